// Many tokens: panels of 16 tokens are the columns, and rows of the weight are multiplied by them, by tiles or by
// broadcasts.
#pragma once

#include "amx.h"
#include "linear_outputs.h"
#include "linear_tokens.h"

namespace inferplane::INFERPLANE_LEVEL {

template <class T>
constexpr bool kUsesTiles = INFERPLANE_HAS_AMX && kIsPaired<T>;

// Panels that are multiplied together: what the registers or tiles have room for.
template <class T>
constexpr int kGroup = kUsesTiles<T> ? 2 : INFERPLANE_HAS_AVX512 ? 3 : 1;

// Depth at a time. A block's rows of 640 stay in the first-level cache while panels stream past. Deeper ones do not, and
// then parts are as deep as the second-level cache allows: each part loads and stores all sums again.
template <class T>
constexpr int64_t kMostDepth = kUsesTiles<T> ? 2048 : 512;

// The parts that depth is taken in: as equal as they can be.
template <class T>
inline int64_t depth_part(int64_t depth) {
  int64_t parts = (depth + kMostDepth<T> - 1) / kMostDepth<T>;
  return ((depth + parts - 1) / parts + 31) / 32 * 32;
}

// What the multiplication takes on the left: pairs as they are, anything else as floats.
template <class T>
struct LeftOf {
  using Number = float;
};
#if INFERPLANE_HAS_AVX512_BF16
template <>
struct LeftOf<bf16> {
  using Number = bf16;
};
#endif

// A block's rows over one part of the depth.
template <class T>
struct Left {
  using Number = typename LeftOf<T>::Number;
  const Number* half[2];
  int64_t stride;  // numbers between two rows
  int size[2];     // rows that may be read
};

// Numbers of memory that `left_of` may need.
template <class T>
constexpr int64_t kStagedNumbers = kBlock * (kMostDepth<T> + 32);

// The rows as they lie in the weight or, where they cannot be multiplied so, copied to `staged`.
template <class T>
Left<T> left_of(const T* weight, int64_t weight_depth, int64_t first_depth, int64_t depth, const Block& block,
                bool is_read_often, typename LeftOf<T>::Number* staged) {
  using Number = typename LeftOf<T>::Number;
  if constexpr (std::is_same_v<T, Number>) {
    bool is_whole = depth % kDepthStep<T> == 0;
    bool has_tile_rows = !kUsesTiles<T> || (block.size[0] == kHalf && block.size[1] == kHalf);
    if (is_whole && has_tile_rows && !(is_read_often && depth < weight_depth)) {
      const T* first = weight + first_depth;
      return {{first + block.first[0] * weight_depth, first + block.first[1] * weight_depth},
              weight_depth,
              {block.size[0], block.size[1]}};
    }
  }
  int64_t width = padded_depth<T>(depth), stride = width + 32;  // so that rows do not fall into one set of the cache
  for (int half = 0; half < 2; ++half)
    for (int row = 0; row < kHalf; ++row) {
      Number* to = staged + (half * kHalf + row) * stride;
      if (row >= block.size[half]) {
        std::memset(to, 0, width * sizeof(Number));
        continue;
      }
      const T* from = weight + (block.first[half] + row) * weight_depth + first_depth;
      if constexpr (std::is_same_v<T, Number>) {
        std::memcpy(to, from, depth * sizeof(Number));
        std::memset(to + depth, 0, (width - depth) * sizeof(Number));
      } else {
        int64_t i = 0;
        for (; i + 16 <= depth; i += 16) store(to + i, load(from + i));
        if (i < depth) store(to + i, load(from + i, int(depth - i)), int(depth - i));
      }
    }
  return {{staged, staged + kHalf * stride}, stride, {kHalf, kHalf}};
}

// Rows that will be on the left next, which are fetched meanwhile, because memory and tiles are busy by turns otherwise:
// kStretches stretches of memory side by side, since the processor itself reads ahead within each page that it sees read.
class Next {
 public:
  static constexpr int kStretches = 4;

  Next() = default;

  // The rows of a whole block, to be fetched in num_steps steps.
  template <class T>
  Next(const T* weight, int64_t depth, const Block& block, int64_t num_steps) {
    int64_t num_bytes = kBlock / kStretches * depth * int64_t(sizeof(T));
    for (int i = 0; i < kStretches; ++i)
      at_[i] = reinterpret_cast<const char*>(weight + block.first[i / 2] * depth) + i % 2 * num_bytes;
    lines_ = int((num_bytes / 64 + num_steps - 1) / num_steps);
  }

  void fetch_step() {
    for (int line = 0; line < lines_; ++line)
      for (auto& at : at_) {
        _mm_prefetch(at, _MM_HINT_T1);
        at += 64;
      }
  }

 private:
  const char* at_[kStretches] = {};
  int lines_ = 0;
};

// sums[kRows][kPanels * 16], kGroup * 16 apart, = or += rows × panels. Of the rows `present` may be read.
template <class T, int kPanels, int kRows>
inline void multiply_rows(const typename LeftOf<T>::Number* rows, int present, int64_t stride, const float* panels,
                          int64_t panel_stride, int64_t depth, float* sums, bool adds) {
  using Number = typename LeftOf<T>::Number;
  constexpr int kStride = kGroup<T> * kPanel, kNumbers = kIsPaired<T> ? 2 : 1;
  // one panel's sums would wait for one another: its neighbours in depth go into sums of their own
  constexpr int kChains = INFERPLANE_HAS_AVX512 && kPanels == 1 ? 2 : 1;
  const Number* row_at[kRows];
  for (int row = 0; row < kRows; ++row) row_at[row] = rows + (row < present ? row : 0) * stride;
  Vec total[kChains][kRows][kPanels];
  for (int row = 0; row < kRows; ++row)
    for (int panel = 0; panel < kPanels; ++panel) {
      total[0][row][panel] = adds ? load(sums + row * kStride + panel * kPanel) : all_of(0);
      if constexpr (kChains == 2) total[1][row][panel] = all_of(0);
    }
  auto add_step = [&](int64_t i, auto& into) {
    Vec columns[kPanels];
#pragma GCC unroll 4
    for (int panel = 0; panel < kPanels; ++panel)
      columns[panel] = load(panels + panel * panel_stride + i / kNumbers * kPanel);
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
#if INFERPLANE_HAS_AVX512_BF16
      if constexpr (kIsPaired<T>) {
        int pair;
        std::memcpy(&pair, row_at[row] + i, 4);
#pragma GCC unroll 4
        for (int panel = 0; panel < kPanels; ++panel)
          into[row][panel].all =
              _mm512_dpbf16_ps(into[row][panel].all, (__m512bh)_mm512_castps_si512(columns[panel].all),
                               (__m512bh)_mm512_set1_epi32(pair));
        continue;
      }
#endif
      if constexpr (!kIsPaired<T>) {
        Vec factor = all_of(row_at[row][i]);
#pragma GCC unroll 4
        for (int panel = 0; panel < kPanels; ++panel)
          into[row][panel] = fma(factor, columns[panel], into[row][panel]);
      }
    }
  };
  int64_t i = 0;
  for (; i + kChains * kNumbers <= depth; i += kChains * kNumbers) {
    add_step(i, total[0]);
    if constexpr (kChains == 2) add_step(i + kNumbers, total[1]);
  }
  if (i < depth) add_step(i, total[0]);
  for (int row = 0; row < kRows; ++row)
    for (int panel = 0; panel < kPanels; ++panel) {
      Vec sum = total[0][row][panel];
      if constexpr (kChains == 2) sum += total[1][row][panel];
      store(sums + row * kStride + panel * kPanel, sum);
    }
}

// sums[32][kGroup * 16] = or += left × panels, over `depth` numbers (padded).
template <class T, int kPanels>
void multiply(const Left<T>& left, Next& next, const float* panels, int64_t panel_stride, int64_t depth, float* sums,
              bool adds) {
  constexpr int kStride = kGroup<T> * kPanel;
#if INFERPLANE_HAS_AMX
  if constexpr (kUsesTiles<T>) {
    static_assert(kPanels <= 2, "tiles 0 to 3 are sums, 4 and 5 columns, 6 and 7 rows");
    const int bytes = kStride * 4;
    if (adds) {
      _tile_loadd(0, sums, bytes);
      _tile_loadd(2, sums + kHalf * kStride, bytes);
      if constexpr (kPanels == 2) _tile_loadd(1, sums + kPanel, bytes);
      if constexpr (kPanels == 2) _tile_loadd(3, sums + kHalf * kStride + kPanel, bytes);
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    const int64_t row_bytes = left.stride * 2;
    for (int64_t i = 0; i < depth; i += 32) {
      next.fetch_step();
      // the hint keeps them from driving the rows, which the next panels need as well, out of the cache
      _tile_stream_loadd(4, panels + i * 8, 64);
      _tile_loadd(6, left.half[0] + i, row_bytes);
      _tile_dpbf16ps(0, 6, 4);
      if constexpr (kPanels == 2) {
        _tile_stream_loadd(5, panels + panel_stride + i * 8, 64);
        _tile_dpbf16ps(1, 6, 5);
      }
      _tile_loadd(7, left.half[1] + i, row_bytes);
      _tile_dpbf16ps(2, 7, 4);
      if constexpr (kPanels == 2) _tile_dpbf16ps(3, 7, 5);
    }
    _tile_stored(0, sums, bytes);
    _tile_stored(2, sums + kHalf * kStride, bytes);
    if constexpr (kPanels == 2) _tile_stored(1, sums + kPanel, bytes);
    if constexpr (kPanels == 2) _tile_stored(3, sums + kHalf * kStride + kPanel, bytes);
    return;
  }
#endif
  (void)next;  // the processor itself keeps up there
  constexpr int kRows = INFERPLANE_HAS_AVX512 ? 8 : 4;  // as many sums as there are registers for
  for (int half = 0; half < 2; ++half)
    for (int first = 0; first < left.size[half]; first += kRows) {
      const auto* rows = left.half[half] + first * left.stride;
      float* to = sums + (half * kHalf + first) * kStride;
      int present = left.size[half] - first;
      if (present <= kRows / 2)
        multiply_rows<T, kPanels, kRows / 2>(rows, present, left.stride, panels, panel_stride, depth, to, adds);
      else
        multiply_rows<T, kPanels, kRows>(rows, present, left.stride, panels, panel_stride, depth, to, adds);
    }
}

template <class T>
inline void multiply(const Left<T>& left, Next& next, const float* panels, int64_t panel_stride, int num_panels,
                     int64_t depth, float* sums, bool adds) {
  if (num_panels == 1) return multiply<T, 1>(left, next, panels, panel_stride, depth, sums, adds);
  if constexpr (kGroup<T> > 1)
    if (num_panels == 2) return multiply<T, 2>(left, next, panels, panel_stride, depth, sums, adds);
  if constexpr (kGroup<T> > 2) multiply<T, 3>(left, next, panels, panel_stride, depth, sums, adds);
}

}  // namespace inferplane::INFERPLANE_LEVEL
