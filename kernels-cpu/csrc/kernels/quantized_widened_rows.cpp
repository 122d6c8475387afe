// Many rows of activations times a quantized matrix, without instructions for products of bytes: strips of the matrix
// are widened to floats, part by part of their depth. A part of a strip lies as columns of sixteen, and so is the right
// factor of plain products (linear_columns.h); it stays in the first-level cache while rows of activations, which may
// lie where they are, stream past. Products of floats are as quick as those of 16-bit numbers, and need no sums for
// each unit of columns.
#include "kernel.h"
#include "linear_columns.h"
#include "quantized.h"

#if !INFERPLANE_HAS_AVX512_VNNI

namespace inferplane::INFERPLANE_LEVEL {
namespace {

constexpr int kPartDepth = 128;                  // columns of the matrix that are widened at a time
constexpr int kStride = kGroup<float> * kPanel;  // of sums
constexpr int64_t kBytesAtOnce = 512 << 10;      // of activations: half of a second-level cache
constexpr int64_t kFewestAtOnce = 96;            // rows, however deep: each time widens the whole matrix
constexpr int kMostStrips = kGroup<float> > 2 ? kGroup<float> : 2;  // of one task

// The activations as floats.
template <class X>
const float* widened_rows(const QuantizedMatrix& w, const Rows<X>& rows) {
  constexpr bool kIsFloat = std::is_same_v<X, float>;
  if (kIsFloat && rows.norm == nullptr) return reinterpret_cast<const float*>(rows.x);
  int64_t depth = w.in_features;
  auto wide = static_cast<float*>(region_scratch(size_t(rows.num_rows * depth) * sizeof(float)));
  for_ranges(rows.num_rows, double(depth), [&](int64_t row, int64_t end) {
    for (; row < end; ++row) {
      float* to = wide + row * depth;
      if constexpr (kIsFloat) {
        norm_row(rows.x, *rows.norm, row, depth, to);
      } else {
        X* room = rows.norm == nullptr ? nullptr : static_cast<X*>(thread_scratch(size_t(depth) * sizeof(X)));
        const X* from = rows.row(w, row, room);
        for (int64_t at = 0; at < depth; at += 16) {
          int n = int(depth - at);
          n >= 16 ? store(to + at, load(from + at)) : store(to + at, load(from + at, n), n);
        }
      }
    }
  });
  return wide;
}

// The codes of one column of a strip's 16 rows, of the words that hold it.
inline Vec codes_at(const uint8_t* words, int shift, int mask) {
#if INFERPLANE_HAS_AVX512
  __m512i shifted = _mm512_srli_epi32(_mm512_load_si512(words), unsigned(shift));
  return {_mm512_cvtepi32_ps(_mm512_and_si512(shifted, _mm512_set1_epi32(mask)))};
#else
  auto half = [&](int at) {
    __m256i shifted = _mm256_srli_epi32(_mm256_load_si256(reinterpret_cast<const __m256i*>(words) + at), shift);
    return _mm256_cvtepi32_ps(_mm256_and_si256(shifted, _mm256_set1_epi32(mask)));
  };
  return {half(0), half(1)};
#endif
}

// Columns first to end of a strip, first a multiple of 16: [columns][16]. Up to a word's columns more may be written.
template <int kBits>
void widen_part(const QuantizedMatrix& w, const uint8_t* strip, int64_t first, int64_t end, float* to) {
  constexpr int kColumns = 32 / kBits;
  auto factors = [&](int64_t offset, int64_t group) {
    const uint8_t* at = strip + offset + group * kStrip * w.scale_bytes;
    return w.scale_bytes == 4 ? load(reinterpret_cast<const float*>(at)) : load(reinterpret_cast<const half*>(at));
  };
  Vec scale = all_of(0), offset = all_of(0);
  for (int64_t column = first; column < end; column += kColumns, to += kColumns * kStrip) {
    if (column == first || column % w.group == 0) {
      scale = factors(w.scale_offset, column / w.group);
      offset = all_of(float(-w.zero)) * scale;
      if (w.has_minimum) offset = offset + factors(w.minimum_offset, column / w.group);
    }
    const uint8_t* words = strip + column / kColumns * kStrip * 4;
#pragma GCC unroll 8
    for (int i = 0; i < kColumns; ++i)
      store(to + i * kStrip, fma(codes_at(words, column_shift(i, kBits), (1 << kBits) - 1), scale, offset));
  }
}

// A task's share: strips of the result, and rows of it.
template <class X>
class Share {
 public:
  Share(const QuantizedMatrix& w, const Rows<X>& rows, const float* x, int first_strip, int num_strips)
      : w_(w), rows_(rows), x_(x), first_(first_strip), num_strips_(num_strips), each_(rows.strips_each()) {}

  void run(int64_t first_row, int64_t end_row) const {
    int64_t num_blocks = (end_row - first_row + kBlock - 1) / kBlock, block_sums = kBlock * kStride;
    int count = num_strips_ * each_, num_groups = (count + kGroup<float> - 1) / kGroup<float>;
    constexpr int kPartFloats = kPartDepth * kStrip;
    auto panels = static_cast<float*>(
        thread_scratch(size_t(count * kPartFloats + num_groups * num_blocks * block_sums) * sizeof(float)));
    float* sums = panels + count * kPartFloats;
    for (int64_t at = 0; at < w_.in_features; at += kPartDepth) {
      int64_t end = w_.in_features - at < kPartDepth ? w_.in_features : at + kPartDepth;
      for (int i = 0; i < count; ++i) widen(i, at, end, panels + i * kPartFloats);
      for (int64_t block = 0; block < num_blocks; ++block) {
        int64_t row = first_row + block * kBlock;
        auto size = [&](int64_t from) {
          int64_t left = end_row - from;
          return int(left < 0 ? 0 : left < kHalf ? left : kHalf);
        };
        const float* x = x_ + row * w_.in_features + at;
        Next nothing;
        Left<float> left{{x, x + kHalf * w_.in_features}, w_.in_features, {size(row), size(row + kHalf)}};
        for (int group = 0; group < num_groups; ++group) {
          int strip = group * kGroup<float>, taken = count - strip < kGroup<float> ? count - strip : kGroup<float>;
          multiply(left, nothing, panels + strip * kPartFloats, kPartFloats, taken, end - at,
                   sums + (group * num_blocks + block) * block_sums, at > 0);
        }
      }
    }
    for (int64_t row = 0; row < end_row - first_row; ++row)
      for (int strip = 0; strip < num_strips_; ++strip) {
        int index = strip * each_;  // a gate and its value are of one group, or one group apart
        const float* own = sums + index / kGroup<float> * num_blocks * block_sums + row * kStride;
        own += index % kGroup<float> * kStrip;
        int64_t apart = kGroup<float> > 1 ? kStrip : num_blocks * block_sums;
        rows_.write(w_, first_row + row, first_ + strip, own, apart, nullptr);
      }
  }

 private:
  // Strip `index` of this share: the gates' strips lie `num_strips` of the whole result before those of the values.
  void widen(int index, int64_t first, int64_t end, float* to) const {
    int64_t strip = first_ + index / each_ + int64_t(index % each_) * rows_.num_strips(w_);
    const uint8_t* packed = w_.strips + strip * w_.strip_bytes;
    w_.bits == 4 ? widen_part<4>(w_, packed, first, end, to) : widen_part<8>(w_, packed, first, end, to);
  }

  const QuantizedMatrix& w_;
  const Rows<X>& rows_;
  const float* x_;
  int first_, num_strips_, each_;
};

}  // namespace

template <class X>
void multiply_widened_rows(const QuantizedMatrix& w, const Rows<X>& rows) {
  const float* x = widened_rows(w, rows);
  int num_strips = rows.num_strips(w), strips_each = kMostStrips / rows.strips_each();
  if (kGroup<float> == 1) strips_each = 1;
  int num_shares = (num_strips + strips_each - 1) / strips_each;
  int64_t most = kBytesAtOnce / (w.in_features * int64_t(sizeof(float)));
  if (most < kFewestAtOnce) most = kFewestAtOnce;
  int64_t num_parts = (rows.num_rows + most - 1) / most;  // equal ones: a small rest would widen the matrix for little
  int64_t rows_each = ((rows.num_rows + num_parts - 1) / num_parts + kBlock - 1) / kBlock * kBlock;
  num_parts = (rows.num_rows + rows_each - 1) / rows_each;
  parallel(int(num_parts) * num_shares, [&](int task, int) {
    int first_strip = task % num_shares * strips_each;
    int strips = num_strips - first_strip < strips_each ? num_strips - first_strip : strips_each;
    int64_t first_row = task / num_shares * rows_each, end_row = first_row + rows_each;
    Share<X>(w, rows, x, first_strip, strips).run(first_row, end_row < rows.num_rows ? end_row : rows.num_rows);
  });
}

template void multiply_widened_rows(const QuantizedMatrix&, const Rows<bf16>&);
template void multiply_widened_rows(const QuantizedMatrix&, const Rows<float>&);

}  // namespace inferplane::INFERPLANE_LEVEL

#endif
