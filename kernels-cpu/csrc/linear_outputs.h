// What becomes of sums: bias, gate, rounding, and the place in the output.
#pragma once

#include <type_traits>

#include "linear.h"
#include "transpose.h"
#include "vec.h"

namespace inferplane::INFERPLANE_LEVEL {

template <class T>
constexpr bool kIsBf16 = std::is_same_v<T, bf16>;

constexpr int kHalf = 16;          // features that one tile or one vector of outputs holds
constexpr int kBlock = 2 * kHalf;  // features that are computed together

// Two halves of 16 weight rows each: neighbours or, with a gate, gates and the values that they belong to.
struct Block {
  int64_t first[2];  // row of the weight
  int size[2];       // rows there are, up to 16
};

inline Block block_at(int64_t index, int64_t out_features, bool is_gated) {
  int64_t end = is_gated ? out_features / 2 : out_features;
  int64_t step = is_gated ? kHalf : kBlock, first = index * step;
  auto rows = [&](int64_t from) { return int(end - from < kHalf ? (end > from ? end - from : 0) : kHalf); };
  if (is_gated) return {{first, end + first}, {rows(first), rows(first)}};
  return {{first, first + kHalf}, {rows(first), rows(first + kHalf)}};
}

inline int64_t num_blocks(int64_t out_features, bool is_gated) {
  return is_gated ? (out_features / 2 + kHalf - 1) / kHalf : (out_features + kBlock - 1) / kBlock;
}

// As precise as T is.
template <class T>
inline Vec silu(Vec a) {
#if INFERPLANE_HAS_AVX512
  if constexpr (kIsBf16<T>)
    return {_mm512_mul_ps(a.all, _mm512_rcp14_ps((all_of(1) + coarse_exp2(a * all_of(-kLog2E))).all))};
#endif
  return a / (all_of(1) + exp2(a * all_of(-kLog2E)));
}

template <class T>
struct Outputs {
  T* out;  // [num_tokens, width]
  const T* bias;
  int64_t width;
  bool is_gated;

  // The block's sums of one token, 32 in a row.
  void put(int64_t token, const Block& block, const float* sums) const {
    Vec values[2];
    for (int half = 0; half < 2; ++half) {
      values[half] = load(sums + half * kHalf);
      if (bias != nullptr && block.size[half] > 0)
        values[half] = values[half] + load(bias + block.first[half], block.size[half]);
    }
    T* row = out + token * width + block.first[0];
    if (is_gated) {
      store_up_to(row, silu<T>(values[0]) * values[1], block.size[0]);
    } else if (block.size[1] == kHalf) {
      store_both(row, values[0], values[1]);
    } else {
      store_up_to(row, values[0], block.size[0]);
      if (block.size[1] > 0) store(row + kHalf, values[1], block.size[1]);
    }
  }

  // The block's sums of up to 16 tokens, [32 features][stride], the tokens one beside the other.
  void put_columns(int64_t first_token, int num_tokens, const Block& block, const float* sums, int64_t stride) const {
#if INFERPLANE_HAS_AVX512_BF16
    if constexpr (kIsBf16<T>) return put_pairs(first_token, num_tokens, block, sums, stride);
#endif
    float by_token[16 * kBlock];
    for (int half = 0; half < 2; ++half) {
      const float* rows[kHalf];
      for (int row = 0; row < kHalf; ++row) rows[row] = sums + (half * kHalf + row) * stride;
      transpose_16x16(rows, by_token + half * kHalf, kBlock);
    }
    for (int token = 0; token < num_tokens; ++token) put(first_token + token, block, by_token + token * kBlock);
  }

 private:
#if INFERPLANE_HAS_AVX512_BF16
  // Rounded first, so that half as much has to be turned round.
  void put_pairs(int64_t first_token, int num_tokens, const Block& block, const float* sums, int64_t stride) const {
    auto row = [&](int half, int feature) {
      Vec values = load(sums + (half * kHalf + feature) * stride);
      if (bias != nullptr && feature < block.size[half])
        values = values + all_of(widen(bias[block.first[half] + feature]));
      return values;
    };
    __m512 pairs[16];
    if (is_gated) {
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) {
        pairs[i] = paired(silu<T>(row(0, 2 * i)) * row(1, 2 * i), silu<T>(row(0, 2 * i + 1)) * row(1, 2 * i + 1));
        pairs[i + 8] = _mm512_setzero_ps();
      }
    } else {
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) pairs[i] = paired(row(i / 8, 2 * i % 16), row(i / 8, 2 * i % 16 + 1));
    }
    transpose_16x16(pairs);
    int size = block.size[0] + (is_gated ? 0 : block.size[1]);
    __mmask32 present = size == 32 ? ~0u : (1u << size) - 1;
    T* to = out + first_token * width + block.first[0];
#pragma GCC unroll 16
    for (int token = 0; token < 16; ++token)
      if (token < num_tokens) _mm512_mask_storeu_epi16(to + token * width, present, _mm512_castps_si512(pairs[token]));
  }

  // Of 16 tokens each: two features beside each other.
  static __m512 paired(Vec even, Vec odd) {
    const __m512i order =
        _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19,
                         3, 18, 2, 17, 1, 16, 0);
    __m512i both = (__m512i)_mm512_cvtne2ps_pbh(odd.all, even.all);
    return _mm512_castsi512_ps(_mm512_permutexvar_epi16(order, both));
  }
#endif

  static void store_up_to(T* to, Vec values, int n) {
    if (n == kHalf)
      store(to, values);
    else
      store(to, values, n);
  }
};

}  // namespace inferplane::INFERPLANE_LEVEL
