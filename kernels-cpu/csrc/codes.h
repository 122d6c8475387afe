// Numbers of one byte, as a KV cache keeps them: whole numbers over a scale of their row, and 8-bit floats.
#pragma once

#include "vec.h"

namespace inferplane::INFERPLANE_LEVEL {

enum class Code : int32_t { kNone = 0, kInt8 = 1, kE4M3 = 2, kE5M2 = 3 };  // as CODES in native_attention.py

inline Vec floats_of_halves(__m256i halves) {
#if INFERPLANE_HAS_AVX512
  return {_mm512_cvtph_ps(halves)};
#else
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
#endif
}

inline Vec floats_of_int8(__m128i codes) {
#if INFERPLANE_HAS_AVX512
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes))};
#else
  auto eight = [](__m128i part) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(part)); };
  return {eight(codes), eight(_mm_srli_si128(codes, 8))};
#endif
}

// The float whose exponent has the bias of half precision, which has the same sign and order of bits: of E5M2 the number
// itself, of E4M3 a 256th of it. NaN is NaN.
inline Vec floats_of_e5m2(__m128i codes) {
  return floats_of_halves(_mm256_slli_epi16(_mm256_cvtepu8_epi16(codes), 8));
}
inline Vec floats_of_e4m3(__m128i codes) {
  __m256i wide = _mm256_cvtepu8_epi16(codes), all = _mm256_set1_epi16(0x7f), magnitude = _mm256_and_si256(wide, all);
  __m256i sign = _mm256_slli_epi16(_mm256_andnot_si256(all, wide), 8);
  __m256i nan = _mm256_and_si256(_mm256_cmpeq_epi16(magnitude, all), _mm256_set1_epi16(0x7e00));
  return floats_of_halves(_mm256_or_si256(_mm256_or_si256(sign, _mm256_slli_epi16(magnitude, 7)), nan));
}

// A row of codes as numbers of type T.
template <class T>
inline void decode(Code code, const uint8_t* codes, float scale, int size, T* numbers) {
  Vec by = all_of(code == Code::kE4M3 ? 256 * scale : scale);
  for (int at = 0; at < size; at += 16) {
    int n = size - at < 16 ? size - at : 16;
    uint8_t padded[16] = {};
    const uint8_t* from = codes + at;
    if (n < 16) from = static_cast<const uint8_t*>(std::memcpy(padded, from, n));
    __m128i sixteen = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    Vec floats = code == Code::kInt8   ? floats_of_int8(sixteen)
                 : code == Code::kE4M3 ? floats_of_e4m3(sixteen)
                                       : floats_of_e5m2(sixteen);
    n == 16 ? store(numbers + at, floats * by) : store(numbers + at, floats * by, n);
  }
}

// The nearest float of 8 bits, to even in the middle, for |x| up to the type's largest number, or NaN.
template <int kMantissa, int kBias>
inline uint8_t float8_of(float x) {
  constexpr int kDropped = 23 - kMantissa;
  constexpr uint32_t kLeastNormal = uint32_t(128 - kBias) << 23;
  // added to a number that is less than that, it leaves a multiple of the least one in the lowest bits
  constexpr uint32_t kAdded = uint32_t(127 + kDropped + 1 - kBias) << 23;
  uint32_t bits, below;
  std::memcpy(&bits, &x, 4);
  uint32_t magnitude = bits & 0x7fffffff;
  float small, added;
  std::memcpy(&small, &magnitude, 4);
  std::memcpy(&added, &kAdded, 4);
  small += added;
  std::memcpy(&below, &small, 4);
  uint32_t rounded = magnitude + (1u << (kDropped - 1)) - 1 + (magnitude >> kDropped & 1);
  uint32_t code = (rounded >> kDropped) - (uint32_t(127 - kBias) << kMantissa);
  code = magnitude < kLeastNormal ? below - kAdded : code;
  code = magnitude > 0x7f800000 ? 0x7f : code;
  return uint8_t(code | (bits >> 24 & 0x80));
}

// A row of numbers as codes over `scale`, within the type's range.
template <class T>
inline void encode_float8(Code code, const T* numbers, float scale, int size, uint8_t* codes) {
  float limit = code == Code::kE4M3 ? 448 : 57344;
  for (int at = 0; at < size; at += 16) {
    int n = size - at < 16 ? size - at : 16;
    float x[16];
    store(x, load(numbers + at, n) / all_of(scale));
    for (int i = 0; i < n; ++i) {
      float within = x[i] > limit ? limit : x[i] < -limit ? -limit : x[i];
      codes[at + i] = code == Code::kE4M3 ? float8_of<3, 7>(within) : float8_of<2, 15>(within);
    }
  }
}

// A row of numbers as whole ones of which the largest is 127; returns their scale, which is NaN where one of them is.
template <class T>
inline float encode_int8(const T* numbers, int size, uint8_t* codes) {
  float largest = 0, odd = 0;
  for (int at = 0; at < size; at += 16) {
    float x[16];
    store(x, load(numbers + at, size - at < 16 ? size - at : 16));
    for (float each : x) {
      float magnitude = __builtin_fabsf(each);
      if (magnitude > largest) largest = magnitude;
      odd += each * 0;  // NaN from the first number on that is infinite or none
    }
  }
  if (odd != 0) {
    std::memset(codes, 0, size);
    return odd;
  }
  float scale = largest == 0 ? 1 : largest / 127;
  for (int at = 0; at < size; at += 16) {
    int n = size - at < 16 ? size - at : 16;
    float x[16];
    store(x, load(numbers + at, n) / all_of(scale));
    for (int i = 0; i < n; ++i) codes[at + i] = uint8_t(int8_t(__builtin_rintf(x[i])));
  }
  return scale;
}

}  // namespace inferplane::INFERPLANE_LEVEL
