// Sixteen floats at a time, in one register or two: the same code at every level.
#pragma once

#include "bf16.h"
#include "kernel.h"

namespace inferplane::INFERPLANE_LEVEL {

// IEEE half precision, as stored.
struct half {
  uint16_t bits;
};

#if INFERPLANE_HAS_AVX512

struct Vec {
  __m512 all;
};

inline Vec all_of(float value) { return {_mm512_set1_ps(value)}; }
inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.all, b.all)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.all, b.all)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.all, b.all)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.all, b.all)}; }
// a * b + c
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.all, b.all, c.all)}; }
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.all, b.all)}; }
inline float sum_of(Vec a) { return _mm512_reduce_add_ps(a.all); }
inline float max_of(Vec a) { return _mm512_reduce_max_ps(a.all); }

inline __mmask16 first_lanes(int n) { return __mmask16((1u << n) - 1); }

inline Vec load(const float* from) { return {_mm512_loadu_ps(from)}; }
inline Vec load(const bf16* from) { return {widen16(from)}; }
inline Vec load(const half* from) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))};
}
inline void store(float* to, Vec a) { _mm512_storeu_ps(to, a.all); }
inline void store(bf16* to, Vec a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrow16(a.all)); }
inline void store(half* to, Vec a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(a.all, _MM_FROUND_TO_NEAREST_INT));
}
// The first n < 16; the others are 0, and nothing behind them is touched.
inline Vec load(const float* from, int n) { return {_mm512_maskz_loadu_ps(first_lanes(n), from)}; }
inline Vec load(const bf16* from, int n) { return {widen16(from, first_lanes(n))}; }
inline Vec load(const half* from, int n) {
  return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(n), from))};
}
inline void store(float* to, Vec a, int n) { _mm512_mask_storeu_ps(to, first_lanes(n), a.all); }
inline void store(bf16* to, Vec a, int n) { _mm256_mask_storeu_epi16(to, first_lanes(n), narrow16(a.all)); }
inline void store(half* to, Vec a, int n) {
  _mm256_mask_storeu_epi16(to, first_lanes(n), _mm512_cvtps_ph(a.all, _MM_FROUND_TO_NEAREST_INT));
}

// Lanes from `first` to `end`, which may lie outside of the vector; `other` in the others.
inline Vec kept_lanes(Vec a, int first, int end, float other) {
  auto below = [](int n) { return n <= 0 ? 0u : n >= 16 ? 0xffffu : (1u << n) - 1; };
  return {_mm512_mask_blend_ps(__mmask16(below(end) & ~below(first)), _mm512_set1_ps(other), a.all)};
}
// Whether no lane is higher, or NaN.
inline bool all_up_to(Vec a, float most) {
  return _mm512_cmp_ps_mask(a.all, _mm512_set1_ps(most), _CMP_NLE_UQ) == 0;
}

// to[0..3]: the sum of the lanes of each.
inline void store_sums(float* to, Vec a, Vec b, Vec c, Vec d) {
  auto pairs = [](Vec x, Vec y) {
    return _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(x.all, y.all), _mm512_unpackhi_ps(x.all, y.all)));
  };
  __m512d ab = pairs(a, b), cd = pairs(c, d);
  __m512 fours =
      _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
  __m256 halves = _mm256_add_ps(_mm512_castps512_ps256(fours), _mm512_extractf32x8_ps(fours, 1));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1)));
}

// Elements 0, 2, ... and 1, 3, ... of 32 bfloat16 numbers.
inline Vec load_even(const bf16* from) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(from), 16))}; }
inline Vec load_odd(const bf16* from) {
  return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(from), _mm512_set1_epi32(int(0xffff0000u))))};
}

// Lane i is the sum, or the highest, of the lanes of rows[i].
#define INFERPLANE_OF_EACH(name, join)                                                                         \
  inline Vec name(const Vec* rows) {                                                                           \
    __m512 pairs[8], fours[4], halves[2];                                                                      \
    for (int i = 0; i < 8; ++i) {                                                                              \
      __m512 a = rows[2 * i].all, b = rows[2 * i + 1].all;                                                     \
      pairs[i] = join(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));                                     \
    }                                                                                                          \
    for (int i = 0; i < 4; ++i) {                                                                              \
      __m512d a = _mm512_castps_pd(pairs[2 * i]), b = _mm512_castps_pd(pairs[2 * i + 1]);                      \
      fours[i] = join(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b))); \
    }                                                                                                          \
    for (int i = 0; i < 2; ++i) {                                                                              \
      __m512 a = fours[2 * i], b = fours[2 * i + 1];                                                           \
      halves[i] = join(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));                    \
    }                                                                                                          \
    return {join(_mm512_shuffle_f32x4(halves[0], halves[1], 0x88),                                             \
                 _mm512_shuffle_f32x4(halves[0], halves[1], 0xdd))};                                           \
  }
INFERPLANE_OF_EACH(sum_of_each, _mm512_add_ps)
INFERPLANE_OF_EACH(max_of_each, _mm512_max_ps)

// 2 ** whole * scaled; whole is rounded down, and may be any number.
inline Vec scale_by_power(Vec scaled, Vec whole) { return {_mm512_scalef_ps(scaled.all, whole.all)}; }
inline Vec fraction(Vec a) { return {_mm512_reduce_ps(a.all, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)}; }

#else

struct Vec {
  __m256 low, high;
};

inline Vec all_of(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
inline Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
// a * b + c
inline Vec fma(Vec a, Vec b, Vec c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
inline float sum_of(Vec a) { return sum8(_mm256_add_ps(a.low, a.high)); }
inline float max_of(Vec a) {
  __m256 eight = _mm256_max_ps(a.low, a.high);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

inline Vec load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
// Lane i is the sum, or the highest, of the lanes of rows[i].
inline Vec sum_of_each(const Vec* rows) {
  float sums[16];
  for (int i = 0; i < 16; ++i) sums[i] = sum_of(rows[i]);
  return load(sums);
}
inline Vec max_of_each(const Vec* rows) {
  float highest[16];
  for (int i = 0; i < 16; ++i) highest[i] = max_of(rows[i]);
  return load(highest);
}

// to[0..3]: the sum of the lanes of each.
inline void store_sums(float* to, Vec a, Vec b, Vec c, Vec d) {
  auto eight = [](Vec x) { return _mm256_add_ps(x.low, x.high); };
  __m256 fours = _mm256_hadd_ps(_mm256_hadd_ps(eight(a), eight(b)), _mm256_hadd_ps(eight(c), eight(d)));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(fours), _mm256_extractf128_ps(fours, 1)));
}

inline Vec load(const bf16* from) { return {widen8(from), widen8(from + 8)}; }
inline Vec load(const half* from) {
  auto eight = reinterpret_cast<const __m128i*>(from);
  return {_mm256_cvtph_ps(_mm_loadu_si128(eight)), _mm256_cvtph_ps(_mm_loadu_si128(eight + 1))};
}
inline void store(float* to, Vec a) {
  _mm256_storeu_ps(to, a.low);
  _mm256_storeu_ps(to + 8, a.high);
}
inline void store(bf16* to, Vec a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), narrow8(a.low));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to) + 1, narrow8(a.high));
}
inline void store(half* to, Vec a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(a.low, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to) + 1, _mm256_cvtps_ph(a.high, _MM_FROUND_TO_NEAREST_INT));
}
// The first n < 16; the others are 0, and nothing behind them is touched.
template <class T>
inline Vec load(const T* from, int n) {
  T padded[16] = {};
  std::memcpy(padded, from, n * sizeof(T));
  return load(padded);
}
template <class T>
inline void store(T* to, Vec a, int n) {
  T padded[16];
  store(padded, a);
  std::memcpy(to, padded, n * sizeof(T));
}

// Lanes from `first` to `end`, which may lie outside of the vector; `other` in the others.
inline Vec kept_lanes(Vec a, int first, int end, float other) {
  float lanes[16];
  store(lanes, a);
  for (int i = 0; i < 16; ++i) lanes[i] = i < first || i >= end ? other : lanes[i];
  return load(lanes);
}

// Elements 0, 2, ... and 1, 3, ... of 32 bfloat16 numbers.
inline Vec load_even(const bf16* from) {
  auto pairs = reinterpret_cast<const __m256i*>(from);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(pairs), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(pairs + 1), 16))};
}
inline Vec load_odd(const bf16* from) {
  auto pairs = reinterpret_cast<const __m256i*>(from);
  __m256i odd = _mm256_set1_epi32(int(0xffff0000u));
  return {_mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(pairs), odd)),
          _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(pairs + 1), odd))};
}

// 2 ** whole * scaled; whole is rounded down. Below -126 the power counts as 0, NaN stays NaN.
inline __m256 scale_by_power(__m256 scaled, __m256 whole) {
  __m256 rounded = _mm256_floor_ps(whole);
  __m256 too_low = _mm256_cmp_ps(rounded, _mm256_set1_ps(-126), _CMP_LT_OQ);
  __m256 bounded = _mm256_min_ps(_mm256_set1_ps(127), rounded);  // of NaN the second
  __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(bounded), _mm256_set1_epi32(127)), 23);
  return _mm256_andnot_ps(too_low, _mm256_mul_ps(scaled, _mm256_castsi256_ps(exponent)));
}
inline Vec scale_by_power(Vec scaled, Vec whole) {
  return {scale_by_power(scaled.low, whole.low), scale_by_power(scaled.high, whole.high)};
}
// Of minus infinity NaN, which scale_by_power turns into 0.
inline Vec fraction(Vec a) {
  return {_mm256_sub_ps(a.low, _mm256_floor_ps(a.low)), _mm256_sub_ps(a.high, _mm256_floor_ps(a.high))};
}

#endif

// Numbers as T has them.
template <class T>
inline Vec rounded(Vec a) {
  T lanes[16];
  store(lanes, a);
  return load(lanes);
}
template <>
inline Vec rounded<float>(Vec a) {
  return a;
}
#if INFERPLANE_HAS_AVX512
template <>
inline Vec rounded<bf16>(Vec a) {
  return {widen16(narrow16(a.all))};
}
#endif

template <class T>
inline void store_both(T* to, Vec first, Vec second) {
  store(to, first);
  store(to + 16, second);
}
#if INFERPLANE_HAS_AVX512_BF16
inline void store_both(bf16* to, Vec first, Vec second) {
  _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(second.all, first.all));
}
#endif

inline Vec& operator+=(Vec& a, Vec b) { return a = a + b; }

// 2 ** a for a <= 127, minus infinity and NaN included. Relative error 2e-7, or 1e-4 for what will be bfloat16.
inline Vec exp2(Vec a) {
  Vec x = fraction(a);
  Vec sum = all_of(1.8775767e-3f);
  sum = fma(sum, x, all_of(8.9893397e-3f));
  sum = fma(sum, x, all_of(5.5826318e-2f));
  sum = fma(sum, x, all_of(2.4015361e-1f));
  sum = fma(sum, x, all_of(6.9315308e-1f));
  sum = fma(sum, x, all_of(9.9999994e-1f));
  return scale_by_power(sum, a);
}
inline Vec coarse_exp2(Vec a) {
  Vec x = fraction(a);
  Vec sum = all_of(7.8023871e-2f);
  sum = fma(sum, x, all_of(2.2606693e-1f));
  sum = fma(sum, x, all_of(6.9583425e-1f));
  sum = fma(sum, x, all_of(9.9992508e-1f));
  return scale_by_power(sum, a);
}
inline float exp2(float a) {
  float lanes[16];
  store(lanes, exp2(all_of(a)));
  return lanes[0];
}

constexpr float kLog2E = 1.44269504f;

// Accurate to 1e-6 absolutely.
inline Vec tanh(Vec a) {
  // beyond 20 it is 1 in float32; the bound passes NaN on as the second operand
  Vec bounded = max(all_of(-20), all_of(0) - max(all_of(-20), all_of(0) - a));
  return all_of(1) - all_of(2) / (exp2(bounded * all_of(2 * kLog2E)) + all_of(1));
}

}  // namespace inferplane::INFERPLANE_LEVEL
