// Few tokens: dot products, for which reading the weight is all that takes time.
#pragma once

#include "linear_outputs.h"
#include "linear_tokens.h"

namespace inferplane::INFERPLANE_LEVEL {

constexpr int kMostDotTokens = 4;  // that rows of the weight are multiplied by at once

// What rows of T are multiplied by: pairs as they are, anything else as floats, which need no widening for each row.
template <class T>
using DotNumber = std::conditional_t<kIsPaired<T>, T, float>;

// Whether columns are taken by 32, the even ones before the odd ones, as a shift and a mask widen them.
template <class T>
constexpr bool kTakesEvenAndOdd = kIsBf16<T> && !kIsPaired<T>;

// A token as dot products take it.
template <class T>
void widen_token(const T* x, int64_t depth, float* to) {
  int64_t i = 0;
  if constexpr (kTakesEvenAndOdd<T>)
    for (; i + 32 <= depth; i += 32) {
      store(to + i, load_even(x + i));
      store(to + i + 16, load_odd(x + i));
    }
  for (; i + 16 <= depth; i += 16) store(to + i, load(x + i));
  if (i < depth) store(to + i, load(x + i, int(depth - i)), int(depth - i));
}

// sums[token][row] of kRows rows, kBlock apart. x: [kTokens, depth].
template <class T, int kRows, int kTokens>
inline void dot_rows(const T* const* rows, int64_t depth, const DotNumber<T>* x, float* sums) {
  Vec total[kRows][kTokens];
  for (int row = 0; row < kRows; ++row)
    for (int token = 0; token < kTokens; ++token) total[row][token] = all_of(0);
  int64_t i = 0;
  // the rows that come next: the processor itself starts to fetch too late
  auto fetch = [&](int row) {
    _mm_prefetch(reinterpret_cast<const char*>(rows[row] + kRows * depth + i), _MM_HINT_T0);
  };
  if constexpr (kIsBf16<T>) {
    for (; i + 32 <= depth; i += 32) {
#pragma GCC unroll 4
      for (int row = 0; row < kRows; ++row) {
        fetch(row);
#if INFERPLANE_HAS_AVX512_BF16
        __m512bh left = (__m512bh)_mm512_loadu_si512(rows[row] + i);
#pragma GCC unroll 4
        for (int token = 0; token < kTokens; ++token)
          total[row][token].all = _mm512_dpbf16_ps(total[row][token].all, left,
                                                   (__m512bh)_mm512_loadu_si512(x + token * depth + i));
#else
        Vec even = load_even(rows[row] + i), odd = load_odd(rows[row] + i);
#pragma GCC unroll 4
        for (int token = 0; token < kTokens; ++token) {
          const float* right = x + token * depth + i;
          total[row][token] = fma(odd, load(right + 16), fma(even, load(right), total[row][token]));
        }
#endif
      }
    }
  }
  for (; i < depth; i += 16) {
    int n = int(depth - i);
    auto next = [&](const auto* from) { return n >= 16 ? load(from) : load(from, n); };
    Vec right[kTokens];
    for (int token = 0; token < kTokens; ++token) right[token] = next(x + token * depth + i);
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row) {
      if constexpr (!kIsBf16<T>) fetch(row);
      Vec left = next(rows[row] + i);
#pragma GCC unroll 4
      for (int token = 0; token < kTokens; ++token) total[row][token] = fma(left, right[token], total[row][token]);
    }
  }
  for (int token = 0; token < kTokens; ++token) {
    float* to = sums + token * kBlock;
    if constexpr (kRows == 4)
      store_sums(to, total[0][token], total[1][token], total[2][token], total[3][token]);
    else
      for (int row = 0; row < kRows; ++row) to[row] = sum_of(total[row][token]);
  }
}

// The same for up to 16 rows.
template <class T, int kTokens>
inline void dot_half(const T* weight, int num_rows, int64_t depth, const DotNumber<T>* x, float* sums) {
  // as many sums as there are registers for
  constexpr int kRows = INFERPLANE_HAS_AVX512 || kTokens == 1 ? 4 : kTokens == 2 ? 2 : 1;
  for (int first = 0; first < num_rows; first += kRows) {
    const T* rows[kRows];
    for (int row = 0; row < kRows; ++row)
      rows[row] = weight + (first + row < num_rows ? first + row : num_rows - 1) * depth;
    dot_rows<T, kRows, kTokens>(rows, depth, x, sums + first);
  }
}

// sums[token][32] of one block. x: [num_tokens, depth].
template <class T>
inline void dot_block(const T* weight, int64_t depth, const Block& block, const DotNumber<T>* x, int num_tokens,
                      float* sums) {
  for (int half = 0; half < 2; ++half) {
    const T* rows = weight + block.first[half] * depth;
    int num_rows = block.size[half];
    for (int token = 0; token < num_tokens; token += kMostDotTokens) {
      const DotNumber<T>* right = x + token * depth;
      float* to = sums + token * kBlock + half * kHalf;
      switch (num_tokens - token) {
        case 1: dot_half<T, 1>(rows, num_rows, depth, right, to); break;
        case 2: dot_half<T, 2>(rows, num_rows, depth, right, to); break;
        case 3: dot_half<T, 3>(rows, num_rows, depth, right, to); break;
        default: dot_half<T, kMostDotTokens>(rows, num_rows, depth, right, to);
      }
    }
  }
}

}  // namespace inferplane::INFERPLANE_LEVEL
