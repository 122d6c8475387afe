// One product with a weight, for any number of tokens: what every thread does of it.
#pragma once

#include "linear.h"
#include "linear_columns.h"
#include "linear_dots.h"
#include "linear_tokens.h"

namespace inferplane::INFERPLANE_LEVEL {

// Up to so many tokens the weight is read with dot products. Tiles take more tokens at no cost; where rows have to be
// widened to floats, to keep those for panels costs as much as a dozen tokens.
template <class T>
constexpr int kFewTokens = kUsesTiles<T> ? 1 : kIsPaired<T> ? 4 : INFERPLANE_HAS_AVX512 && sizeof(T) == 2 ? 24 : 12;

constexpr int64_t kPackedBytes = 1 << 20;  // of tokens at a time: half of a second-level cache
constexpr int kFewestTokens = 192;         // at a time, however deep: each time reads the whole weight
constexpr int kFewestOfThread = 96;        // so many for each thread are worth that each reads the whole weight

// Speeds of one thread, roughly, to share out the work.
constexpr double kBytesPerNs = 16, kPackingNs = 2, kNormingNs = 6;  // the latter for each number of a panel's depth
template <class T>
constexpr double kProductsPerNs = kUsesTiles<T> ? 800 : kIsPaired<T> ? 80 : 40;

template <class T>
class Product {
 public:
  Product(const LinearWeight& weight, const NormBefore* norm, const void* x, void* out, int64_t num_tokens,
          bool is_gated)
      : weight_(static_cast<const T*>(weight.weight)),
        depth_(weight.in_features),
        out_features_(weight.out_features),
        norm_(norm),
        x_(static_cast<const T*>(x)),
        num_tokens_(num_tokens),
        outputs_{static_cast<T*>(out), static_cast<const T*>(weight.bias),
                 is_gated ? weight.out_features / 2 : weight.out_features, is_gated} {}

  void run() {
    if (num_tokens_ == 0) return;
    if (num_tokens_ <= kFewTokens<T>) return run_few();
    int64_t num_parts = fewest_parts(), threads = num_threads();
    bool shares_tokens = num_tokens_ >= threads * kFewestOfThread && depth_ <= kMostDepth<T>;
    if (shares_tokens) num_parts = (num_parts + threads - 1) / threads * threads;
    int64_t at_once = tokens_each(num_parts);
    if (shares_tokens) return run_parts(at_once);
    for (int64_t first = 0; first < num_tokens_; first += at_once)
      run_many(first, num_tokens_ - first < at_once ? num_tokens_ - first : at_once);
  }

  // One of num_shares equal parts of the outputs, in the calling thread alone; takes its region_scratch.
  void run_share(int64_t share, int64_t num_shares) const {
    int64_t first = blocks() * share / num_shares, end = blocks() * (share + 1) / num_shares;
    if (num_tokens_ <= kFewTokens<T>) return dot_blocks(first, end, dot_tokens());
    int64_t at_once = tokens_each(fewest_parts()), panel_stride = panel_floats<T>(depth_);
    auto panels = static_cast<float*>(region_scratch(size_t(at_once / kPanel * panel_stride) * sizeof(float)));
    for (int64_t token = 0; token < num_tokens_; token += at_once) {
      int64_t num_tokens = num_tokens_ - token < at_once ? num_tokens_ - token : at_once;
      pack(token, num_tokens, 0, (num_tokens + kPanel - 1) / kPanel, panels, panel_stride);
      multiply_blocks(first, end, -1, token, num_tokens, panels, panel_stride);
    }
  }

  // Outputs are computed by so many together.
  int64_t blocks() const { return num_blocks(out_features_, outputs_.is_gated); }


 private:
  // Parts of the tokens that are taken one after another, and how many each has. They are equal: a small rest would
  // read the whole weight for little.
  int64_t fewest_parts() const {
    int64_t most = kPackedBytes / (panel_floats<T>(depth_) * 4 / kPanel);
    if (most < kFewestTokens) most = kFewestTokens;
    return (num_tokens_ + most - 1) / most;
  }
  int64_t tokens_each(int64_t num_parts) const {
    constexpr int kStep = kGroup<T> * kPanel;
    return ((num_tokens_ + num_parts - 1) / num_parts + kStep - 1) / kStep * kStep;
  }

  // Of one block with so many tokens: to read its rows, and to multiply.
  double nanoseconds(int64_t num_tokens) const {
    double numbers = double(kBlock) * double(depth_);
    return numbers * sizeof(T) / kBytesPerNs + numbers * double(num_tokens) / kProductsPerNs<T>;
  }

  void run_few() const {
    const DotNumber<T>* x = dot_tokens();
    for_ranges(blocks(), nanoseconds(num_tokens_), [&](int64_t first, int64_t end) { dot_blocks(first, end, x); });
  }

  void dot_blocks(int64_t first, int64_t end, const DotNumber<T>* x) const {
    float sums[kFewTokens<T> * kBlock];
    for (int64_t index = first; index < end; ++index) {
      Block block = block_at(index, out_features_, outputs_.is_gated);
      dot_block(weight_, depth_, block, x, int(num_tokens_), sums);
      for (int token = 0; token < num_tokens_; ++token) outputs_.put(token, block, sums + token * kBlock);
    }
  }

  // The tokens, normed if they have to be, as dot products take them.
  const DotNumber<T>* dot_tokens() const {
    constexpr bool kIsReady = std::is_same_v<T, DotNumber<T>>;
    if (kIsReady && norm_ == nullptr) return reinterpret_cast<const DotNumber<T>*>(x_);
    int64_t num_numbers = num_tokens_ * depth_;
    auto tokens = static_cast<DotNumber<T>*>(region_scratch(num_numbers * sizeof(DotNumber<T>) + depth_ * sizeof(T)));
    T* normed = reinterpret_cast<T*>(tokens + num_numbers);
    for (int64_t token = 0; token < num_tokens_; ++token) {
      DotNumber<T>* to = tokens + token * depth_;
      if constexpr (kIsReady) {
        norm_row(x_, *norm_, token, depth_, to);
      } else {
        if (norm_ != nullptr) norm_row(x_, *norm_, token, depth_, normed);
        widen_token(norm_ == nullptr ? x_ + token * depth_ : normed, depth_, to);
      }
    }
    return tokens;
  }

  // Threads share the tokens out: each packs its own, so that their panels are in its core's cache and in no other's.
  void run_parts(int64_t at_once) const {
    int64_t panel_stride = panel_floats<T>(depth_), part_floats = at_once / kPanel * panel_stride;
    auto memory = static_cast<float*>(region_scratch(num_threads() * part_floats * sizeof(float)));
    parallel(int((num_tokens_ + at_once - 1) / at_once), [&](int part, int thread) {
      int64_t first = part * at_once, num_tokens = num_tokens_ - first < at_once ? num_tokens_ - first : at_once;
      float* panels = memory + thread * part_floats;
      pack(first, num_tokens, 0, (num_tokens + kPanel - 1) / kPanel, panels, panel_stride);
      multiply_blocks(0, blocks(), -1, first, num_tokens, panels, panel_stride);
    });
  }

  // Threads share the weight's rows out, behind having packed all tokens together.
  void run_many(int64_t first_token, int64_t num_tokens) const {
    int num_panels = int((num_tokens + kPanel - 1) / kPanel);
    int64_t panel_stride = panel_floats<T>(depth_);
    auto panels = static_cast<float*>(region_scratch(num_panels * panel_stride * sizeof(float)));
    double packing_ns = norm_ == nullptr ? kPackingNs : kPackingNs + kNormingNs;
    for_ranges(num_panels, packing_ns * double(depth_), [&](int64_t panel, int64_t end) {
      pack(first_token, num_tokens, panel, end, panels, panel_stride);
    });
    int64_t per_range = things_per_task(blocks(), nanoseconds(num_tokens), 16);
    int num_takers = per_range < blocks() ? num_threads() : 1;
    Queue ranges((blocks() + per_range - 1) / per_range, num_takers);
    parallel(num_takers, [&](int, int) {
      ranges.work_off([&](int64_t range, int64_t next) {
        int64_t first = range * per_range, end = first + per_range;
        if (end > blocks()) end = blocks();
        multiply_blocks(first, end, next < 0 ? -1 : next * per_range, first_token, num_tokens, panels, panel_stride);
      });
    });
  }

  // Panels from `panel` to `end` of the tokens from first_token on.
  void pack(int64_t first_token, int64_t num_tokens, int64_t panel, int64_t end, float* panels,
            int64_t panel_stride) const {
    for (; panel < end; ++panel) {
      int64_t first = panel * kPanel;
      int rows = int(num_tokens - first < kPanel ? num_tokens - first : kPanel);
      pack_panel(x_, norm_, first_token + first, rows, depth_, panels + panel * panel_stride);
    }
  }

  // Blocks from `first` to `end`. The thread goes on with block `then`, if that is not -1.
  void multiply_blocks(int64_t first, int64_t end, int64_t then, int64_t first_token, int64_t num_tokens,
                       const float* panels, int64_t panel_stride) const {
#if INFERPLANE_HAS_AMX
    Tiles tiles;
#endif
    using Number = typename Left<T>::Number;
    constexpr int kStride = kGroup<T> * kPanel, kSums = kBlock * kStride;
    int num_panels = int((num_tokens + kPanel - 1) / kPanel), num_groups = (num_panels + kGroup<T> - 1) / kGroup<T>;
    int64_t part = depth_part<T>(depth_);
    bool keeps_sums = part < depth_;  // of all groups and blocks; else of this group and the one before
    size_t num_sums = kSums * (keeps_sums ? (end - first) * num_groups : 2);
    auto all_sums = static_cast<float*>(thread_scratch(num_sums * sizeof(float) + kStagedNumbers<T> * sizeof(Number)));
    auto staged = reinterpret_cast<Number*>(all_sums + num_sums);
    struct Finished {
      Block block;
      int panel, size;
      const float* sums;
    } before{};
    auto put = [&](const Finished& done) {
      for (int i = 0; i < done.size; ++i) {
        int64_t token = int64_t(done.panel + i) * kPanel;
        int tokens = int(num_tokens - token < kPanel ? num_tokens - token : kPanel);
        outputs_.put_columns(first_token + token, tokens, done.block, done.sums + i * kPanel, kStride);
      }
    };
    int turn = 0;
    for (int64_t at = 0; at < depth_; at += part) {
      int64_t depth = depth_ - at < part ? depth_ - at : part;
      for (int64_t index = first; index < end; ++index) {
        Block block = block_at(index, out_features_, outputs_.is_gated);
        Left<T> left = left_of(weight_, depth_, at, depth, block, num_groups > 2, staged);
        int64_t following = index + 1 < end ? index + 1 : then;
        Block after = block_at(following, out_features_, outputs_.is_gated);
        Next next;
        if (num_groups > 1 && !keeps_sums && following >= 0 && after.size[1] == kHalf)
          next = Next(weight_, depth_, after, num_groups * ((depth + 31) / 32));
        for (int group = 0; group < num_groups; ++group) {
          int panel = group * kGroup<T>, size = num_panels - panel < kGroup<T> ? num_panels - panel : kGroup<T>;
          float* sums = all_sums + kSums * (keeps_sums ? (index - first) * num_groups + group : turn++ % 2);
          const float* columns = panels + panel * panel_stride + at * kPanel / (kIsPaired<T> ? 2 : 1);
          multiply(left, next, columns, panel_stride, size, padded_depth<T>(depth), sums, at > 0);
          if (at + depth < depth_) continue;
          // Behind the next product rather than behind its own, which the tiles are still busy with.
          put(before);
          before = {block, panel, size, sums};
        }
      }
    }
    put(before);
  }

  const T* weight_;
  int64_t depth_, out_features_;
  const NormBefore* norm_;
  const T* x_;
  int64_t num_tokens_;
  Outputs<T> outputs_;
};

// Compiled in kernels/linear.cpp for all sources.
extern template class Product<float>;
extern template class Product<bf16>;
extern template class Product<half>;

}  // namespace inferplane::INFERPLANE_LEVEL
