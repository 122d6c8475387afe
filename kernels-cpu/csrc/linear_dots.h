// Few tokens: dot products, for which reading the weight is all that takes time.
#pragma once

#include "linear_outputs.h"

namespace inferplane::INFERPLANE_LEVEL {

constexpr int kMostDotTokens = 4;

// sums[token][32] of one block. x: [kTokens, depth].
template <class T, int kTokens>
void dot_block(const T* weight, int64_t depth, const Block& block, const T* x, float* sums) {
  // as many sums as there are registers for
  constexpr int kRows = INFERPLANE_HAS_AVX512 || kTokens == 1 ? 4 : kTokens == 2 ? 2 : 1;
  for (int half = 0; half < 2; ++half)
    for (int first = 0; first < block.size[half]; first += kRows) {
      const T* rows[kRows];
      for (int row = 0; row < kRows; ++row) {
        int present = first + row < block.size[half] ? first + row : block.size[half] - 1;
        rows[row] = weight + (block.first[half] + present) * depth;
      }
      Vec total[kRows][kTokens];
      for (int row = 0; row < kRows; ++row)
        for (int token = 0; token < kTokens; ++token) total[row][token] = all_of(0);
      int64_t i = 0;
      if constexpr (kIsBf16<T>) {
        for (; i + 32 <= depth; i += 32) {
#if INFERPLANE_HAS_AVX512_BF16
#pragma GCC unroll 4
          for (int row = 0; row < kRows; ++row) {
            // the rows that come next: the processor itself starts to fetch too late
            _mm_prefetch(reinterpret_cast<const char*>(rows[row] + kRows * depth + i), _MM_HINT_T0);
            __m512bh left = (__m512bh)_mm512_loadu_si512(rows[row] + i);
#pragma GCC unroll 4
            for (int token = 0; token < kTokens; ++token)
              total[row][token].all = _mm512_dpbf16_ps(total[row][token].all, left,
                                                       (__m512bh)_mm512_loadu_si512(x + token * depth + i));
          }
#else
          Vec even[kTokens], odd[kTokens];
          for (int token = 0; token < kTokens; ++token) {
            even[token] = load_even(x + token * depth + i);
            odd[token] = load_odd(x + token * depth + i);
          }
#pragma GCC unroll 4
          for (int row = 0; row < kRows; ++row) {
            Vec left_even = load_even(rows[row] + i), left_odd = load_odd(rows[row] + i);
#pragma GCC unroll 4
            for (int token = 0; token < kTokens; ++token)
              total[row][token] = fma(left_odd, odd[token], fma(left_even, even[token], total[row][token]));
          }
#endif
        }
      }
      for (; i < depth; i += 16) {
        int n = int(depth - i);
        auto next = [&](const T* from) { return n >= 16 ? load(from) : load(from, n); };
        Vec right[kTokens];
        for (int token = 0; token < kTokens; ++token) right[token] = next(x + token * depth + i);
#pragma GCC unroll 4
        for (int row = 0; row < kRows; ++row) {
          Vec left = next(rows[row] + i);
#pragma GCC unroll 4
          for (int token = 0; token < kTokens; ++token)
            total[row][token] = fma(left, right[token], total[row][token]);
        }
      }
      for (int token = 0; token < kTokens; ++token)
        for (int row = 0; row < kRows && first + row < kHalf; ++row)
          sums[token * kBlock + half * kHalf + first + row] = sum_of(total[row][token]);
    }
}

template <class T>
inline void dot_block(const T* weight, int64_t depth, const Block& block, const T* x, int num_tokens, float* sums) {
  switch (num_tokens) {
    case 1: return dot_block<T, 1>(weight, depth, block, x, sums);
    case 2: return dot_block<T, 2>(weight, depth, block, x, sums);
    case 3: return dot_block<T, 3>(weight, depth, block, x, sums);
    default: return dot_block<T, kMostDotTokens>(weight, depth, block, x, sums);
  }
}

}  // namespace inferplane::INFERPLANE_LEVEL
