// C += A B for a few rows of A and panels of B (kv_tiles.h), in registers or AMX tiles.
#pragma once

#include <type_traits>

#include "amx.h"
#include "kv_tiles.h"

namespace inferplane::INFERPLANE_LEVEL {

// What the left matrix is made of: pairs of bfloat16 where there is an instruction for them, else floats.
template <class T>
struct LeftOf {
  using type = float;
};
#if INFERPLANE_HAS_AVX512_BF16
template <>
struct LeftOf<bf16> {
  using type = bf16;
};
#endif
template <class T>
using Left = typename LeftOf<T>::type;

// Whether numbers are multiplied as high and low bfloat16 halves, by tiles, where there are many rows of them.
template <class T>
constexpr bool kSplits = false;
#if INFERPLANE_HAS_AMX
template <>
inline constexpr bool kSplits<half> = true;
#endif

// Whether numbers are widened to floats before many rows are multiplied by them, rather than for each few of the rows.
template <class T>
constexpr bool kWidens = sizeof(T) == 2 && std::is_same_v<Left<T>, float> && !kSplits<T>;

// Rows of the left matrix are read in sixteens by AMX, so that memory for so many must be there; and to a multiple of 32
// numbers, of which those beyond the depth are 0. The more rows, the less it costs to split or widen what they are
// multiplied by.
template <class T>
constexpr int kMostRows = kSplits<T> ? 128 : kWidens<T> ? 48 : 32;

// The right matrix: `num_parts` parts one below the other, each `depth` deep (a multiple of 16) and all as wide.
struct Right {
  const void* const* parts;
  int num_parts, depth, num_panels;
  int panel_stride;  // elements
  int left_parts;    // that the left matrix has: it begins again behind them, once

  int left_at(int part) const { return (part < left_parts ? part : part - left_parts) * depth; }
};

// Adds the product of one column of the left, or a pair of columns, and the row of each panel that meets it.
template <class T, int kRows, int kPanels>
inline void add_column(const Left<T>* left, int a_stride, const T* right, int panel_stride, Vec (&sums)[kRows][kPanels]) {
#if INFERPLANE_HAS_AVX512_BF16
  constexpr bool kTakesPairs = kPair<T> == 2;
  if constexpr (kTakesPairs) {
    __m512bh columns[kPanels];
#pragma GCC unroll 8
    for (int panel = 0; panel < kPanels; ++panel)
      columns[panel] = (__m512bh)_mm512_loadu_si512(right + panel * panel_stride);
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      int pair;
      std::memcpy(&pair, left + row * a_stride, 4);
      __m512bh factors = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 8
      for (int panel = 0; panel < kPanels; ++panel)
        sums[row][panel].all = _mm512_dpbf16_ps(sums[row][panel].all, factors, columns[panel]);
    }
  }
#else
  constexpr bool kTakesPairs = false;
#endif
  if constexpr (!kTakesPairs) {
#pragma GCC unroll 2
    for (int odd = 0; odd < kPair<T>; ++odd) {
      Vec columns[kPanels];
#pragma GCC unroll 8
      for (int panel = 0; panel < kPanels; ++panel) {
        const T* from = right + panel * panel_stride;
        if constexpr (kPair<T> == 1)
          columns[panel] = load(from);
        else
          columns[panel] = odd ? load_odd(from) : load_even(from);
      }
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) {
        Vec factor = all_of(left[row * a_stride + odd]);
#pragma GCC unroll 8
        for (int panel = 0; panel < kPanels; ++panel) sums[row][panel] = fma(factor, columns[panel], sums[row][panel]);
      }
    }
  }
}

template <class T, int kRows, int kPanels>
inline void multiply_block(const Left<T>* a, int a_stride, const Right& b, int first_panel, float* c, int c_stride,
                           bool adds) {
  Vec sums[kRows][kPanels];
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 8
    for (int panel = 0; panel < kPanels; ++panel)
      sums[row][panel] = adds ? load(c + row * c_stride + panel * 16) : all_of(0);
  for (int part = 0; part < b.num_parts; ++part) {
    const T* right = static_cast<const T*>(b.parts[part]) + first_panel * b.panel_stride;
    const Left<T>* left = a + b.left_at(part);
    for (int at = 0; at < b.depth; at += kPair<T>)
      add_column<T>(left + at, a_stride, right + at * 16, b.panel_stride, sums);
  }
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 8
    for (int panel = 0; panel < kPanels; ++panel) store(c + row * c_stride + panel * 16, sums[row][panel]);
}

template <class T, int kRows>
inline void multiply_rows(const Left<T>* a, int a_stride, const Right& b, float* c, int c_stride, bool adds) {
  int panel = 0;
  constexpr int kWide = INFERPLANE_HAS_AVX512 ? 4 : 2;
  for (; panel + kWide <= b.num_panels; panel += kWide)
    multiply_block<T, kRows, kWide>(a, a_stride, b, panel, c + panel * 16, c_stride, adds);
  if constexpr (kWide > 2)
    for (; panel + 2 <= b.num_panels; panel += 2)
      multiply_block<T, kRows, 2>(a, a_stride, b, panel, c + panel * 16, c_stride, adds);
  for (; panel < b.num_panels; ++panel)
    multiply_block<T, kRows, 1>(a, a_stride, b, panel, c + panel * 16, c_stride, adds);
}

// Of kMost rows or fewer.
template <class T, int kMost>
inline void multiply_rest(int num_rows, const Left<T>* a, int a_stride, const Right& b, float* c, int c_stride,
                          bool adds) {
  if constexpr (kMost > 0) {
    if (num_rows < kMost) return multiply_rest<T, kMost - 1>(num_rows, a, a_stride, b, c, c_stride, adds);
    multiply_rows<T, kMost>(a, a_stride, b, c, c_stride, adds);
  }
}

#if INFERPLANE_HAS_AMX

// Tiles 0 to 3 are sums, 4 and 5 rows of the left, 6 and 7 columns of the right.
template <int kRowTiles, int kPanels>
inline void multiply_tiles(const bf16* a, int a_stride, const Right& b, int first_panel, float* c, int c_stride,
                           bool adds) {
  size_t a_bytes = a_stride * 2, c_bytes = c_stride * 4;
  auto c_at = [&](int row_tile, int panel) { return c + row_tile * 16 * c_stride + panel * 16; };
  if (adds) {
    _tile_loadd(0, c_at(0, 0), c_bytes);
    if (kPanels > 1) _tile_loadd(1, c_at(0, 1), c_bytes);
    if (kRowTiles > 1) _tile_loadd(2, c_at(1, 0), c_bytes);
    if (kRowTiles > 1 && kPanels > 1) _tile_loadd(3, c_at(1, 1), c_bytes);
  } else {
    _tile_zero(0);
    if (kPanels > 1) _tile_zero(1);
    if (kRowTiles > 1) _tile_zero(2);
    if (kRowTiles > 1 && kPanels > 1) _tile_zero(3);
  }
  // the compiler is not told what the instructions read
  asm volatile("" ::: "memory");
  alignas(64) bf16 padded[2][512];
  for (int part = 0; part < b.num_parts; ++part) {
    const bf16* right = static_cast<const bf16*>(b.parts[part]) + first_panel * b.panel_stride;
    const bf16* row = a + b.left_at(part);
    for (int at = 0; at < b.depth; at += 32) {
      const bf16 *column[2] = {right + at * 16, right + b.panel_stride + at * 16};
      if (b.depth - at < 32) {  // half a tile; what lies behind it is another panel's
        for (int panel = 0; panel < kPanels; ++panel) {
          std::memcpy(padded[panel], column[panel], 512);
          std::memset(padded[panel] + 256, 0, 512);
          column[panel] = padded[panel];
        }
        asm volatile("" ::: "memory");
      }
      const bf16* left = row + at;
      _tile_loadd(4, left, a_bytes);
      _tile_loadd(6, column[0], 64);
      _tile_dpbf16ps(0, 4, 6);
      if (kPanels > 1) {
        _tile_loadd(7, column[1], 64);
        _tile_dpbf16ps(1, 4, 7);
      }
      if (kRowTiles > 1) {
        _tile_loadd(5, left + 16 * a_stride, a_bytes);
        _tile_dpbf16ps(2, 5, 6);
        if (kPanels > 1) _tile_dpbf16ps(3, 5, 7);
      }
    }
  }
  _tile_stored(0, c_at(0, 0), c_bytes);
  if (kPanels > 1) _tile_stored(1, c_at(0, 1), c_bytes);
  if (kRowTiles > 1) _tile_stored(2, c_at(1, 0), c_bytes);
  if (kRowTiles > 1 && kPanels > 1) _tile_stored(3, c_at(1, 1), c_bytes);
}

template <int kRowTiles>
inline void multiply_row_tiles(const bf16* a, int a_stride, const Right& b, float* c, int c_stride, bool adds) {
  int panel = 0;
  for (; panel + 2 <= b.num_panels; panel += 2)
    multiply_tiles<kRowTiles, 2>(a, a_stride, b, panel, c + panel * 16, c_stride, adds);
  if (panel < b.num_panels) multiply_tiles<kRowTiles, 1>(a, a_stride, b, panel, c + panel * 16, c_stride, adds);
}

#endif

#if INFERPLANE_HAS_AMX

// A number as the sum of two of bfloat16: 17 bits of it.
struct Halves {
  __m256i high, low;
};

inline Halves halves_of(Vec a) {
  __m256i high = narrow16(a.all);
  return {high, narrow16(_mm512_sub_ps(a.all, widen16(high)))};
}

// Pairs of rows of 16 numbers, as they lie in panels of float16, as rows of 16 pairs of bfloat16. The high halves are cut
// off, and what is left of 11 bits fits into the low ones.
inline void split_panels(const half* from, int size, bf16* high, bf16* low) {
  constexpr int kSelect = 0xca;
  const __m512i upper = _mm512_set1_epi32(int(0xffff0000u));
  auto paired = [&](__m512i even, __m512i odd) {
    return _mm512_ternarylogic_epi32(upper, odd, _mm512_srli_epi32(even, 16), kSelect);
  };
  auto rest = [&](__m512 value) {
    __m512i cut = _mm512_and_si512(_mm512_castps_si512(value), upper);
    return _mm512_castps_si512(_mm512_sub_ps(value, _mm512_castsi512_ps(cut)));
  };
  for (int at = 0; at < size; at += 32) {
    __m512 even = load(from + at).all, odd = load(from + at + 16).all;
    _mm512_store_si512(high + at, paired(_mm512_castps_si512(even), _mm512_castps_si512(odd)));
    _mm512_store_si512(low + at, paired(rest(even), rest(odd)));
  }
}

#endif

// Panels as they are stored, as panels of floats.
template <class T>
inline void widen_panels(const T* from, int size, float* to) {
  for (int at = 0; at < size; at += 16 * kPair<T>) {
    if constexpr (kPair<T> == 2) {
      store(to + at, load_even(from + at));
      store(to + at + 16, load_odd(from + at));
    } else {
      store(to + at, load(from + at));
    }
  }
}

// c: [num_rows, 16 * num_panels], a: [num_rows, num_parts * depth], at most kMostRows. Rows of c up to the next multiple
// of 16 may be overwritten. With AMX the caller keeps `Tiles` alive.
template <class T>
inline void multiply(int num_rows, const Left<T>* a, int a_stride, const Right& b, float* c, int c_stride, bool adds) {
#if INFERPLANE_HAS_AMX
  if constexpr (kPair<T> == 2) {
    int row = 0;
    for (; row + 16 < num_rows; row += 32)
      multiply_row_tiles<2>(a + row * a_stride, a_stride, b, c + row * c_stride, c_stride, adds);
    if (row < num_rows) multiply_row_tiles<1>(a + row * a_stride, a_stride, b, c + row * c_stride, c_stride, adds);
    return;
  }
#endif
  // as many sums as there are registers for, beside what is widened
  constexpr int kRows = !INFERPLANE_HAS_AVX512 ? 2 : std::is_same_v<T, float> ? 6 : 4;
  int row = 0;
  for (; row + kRows <= num_rows; row += kRows)
    multiply_rows<T, kRows>(a + row * a_stride, a_stride, b, c + row * c_stride, c_stride, adds);
  a += row * a_stride;
  c += row * c_stride;
  multiply_rest<T, kRows - 1>(num_rows - row, a, a_stride, b, c, c_stride, adds);
}

}  // namespace inferplane::INFERPLANE_LEVEL
