// Blocks of 16 × 16 elements of four bytes: floats, or pairs of half-precision numbers.
#pragma once

#include "kernel.h"

namespace inferplane::INFERPLANE_LEVEL {

#if INFERPLANE_HAS_AVX512

// Sixteen rows in registers.
inline void transpose_16x16(__m512 (&a)[16]) {
  __m512 b[16];
  // within each 128-bit lane 4 × 4, then the lanes
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    __m512 low01 = _mm512_unpacklo_ps(a[i], a[i + 1]), high01 = _mm512_unpackhi_ps(a[i], a[i + 1]);
    __m512 low23 = _mm512_unpacklo_ps(a[i + 2], a[i + 3]), high23 = _mm512_unpackhi_ps(a[i + 2], a[i + 3]);
    b[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(low01), _mm512_castps_pd(low23)));
    b[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(low01), _mm512_castps_pd(low23)));
    b[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(high01), _mm512_castps_pd(high23)));
    b[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(high01), _mm512_castps_pd(high23)));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    __m512 even_top = _mm512_shuffle_f32x4(b[i], b[i + 4], 0x88), odd_top = _mm512_shuffle_f32x4(b[i], b[i + 4], 0xdd);
    __m512 even_end = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0x88);
    __m512 odd_end = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0xdd);
    a[i] = _mm512_shuffle_f32x4(even_top, even_end, 0x88);
    a[i + 4] = _mm512_shuffle_f32x4(odd_top, odd_end, 0x88);
    a[i + 8] = _mm512_shuffle_f32x4(even_top, even_end, 0xdd);
    a[i + 12] = _mm512_shuffle_f32x4(odd_top, odd_end, 0xdd);
  }
}

// to[j * to_stride + i] = rows[i][j], for 16 rows of 16.
inline void transpose_16x16(const float* const* rows, float* to, int64_t to_stride) {
  __m512 a[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_ps(rows[i]);
  transpose_16x16(a);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) _mm512_storeu_ps(to + i * to_stride, a[i]);
}

#else

inline void transpose_8x8(const float* const* rows, int column, float* to, int64_t to_stride) {
  __m256 a[8], b[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) a[i] = _mm256_loadu_ps(rows[i] + column);
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    __m256 low01 = _mm256_unpacklo_ps(a[i], a[i + 1]), high01 = _mm256_unpackhi_ps(a[i], a[i + 1]);
    __m256 low23 = _mm256_unpacklo_ps(a[i + 2], a[i + 3]), high23 = _mm256_unpackhi_ps(a[i + 2], a[i + 3]);
    b[i] = _mm256_shuffle_ps(low01, low23, 0x44);
    b[i + 1] = _mm256_shuffle_ps(low01, low23, 0xee);
    b[i + 2] = _mm256_shuffle_ps(high01, high23, 0x44);
    b[i + 3] = _mm256_shuffle_ps(high01, high23, 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(to + i * to_stride, _mm256_permute2f128_ps(b[i], b[i + 4], 0x20));
    _mm256_storeu_ps(to + (i + 4) * to_stride, _mm256_permute2f128_ps(b[i], b[i + 4], 0x31));
  }
}

inline void transpose_16x16(const float* const* rows, float* to, int64_t to_stride) {
  for (int top = 0; top < 16; top += 8)
    for (int column = 0; column < 16; column += 8)
      transpose_8x8(rows + top, column, to + column * to_stride + top, to_stride);
}

#endif

}  // namespace inferplane::INFERPLANE_LEVEL
