// Rows of activations times a quantized matrix, in whole numbers: activations become fixed point of 16 bits with a scale
// for each unit of columns, a unit's products are summed exactly, and the sums of units as float32. With VNNI the high and
// the low bytes of the activations are multiplied one by one by the codes, which are bytes then; else both are 16-bit
// numbers. Every code is read once for up to kMaxRows rows: a stream. For many rows that is the quickest way with VNNI and
// without AMX; else they have sources of their own.
#include <type_traits>

#include "kernel.h"
#include "quantized.h"

namespace inferplane::INFERPLANE_LEVEL {
namespace {

#if INFERPLANE_HAS_AVX512
constexpr int kLanes = 16;
// Rows and strips that are multiplied at once: where four columns take an instruction, reading activations would take
// as long, and is done for two strips together.
constexpr int kMaxRows = INFERPLANE_HAS_AVX512_VNNI ? 4 : 8, kStripsAtOnce = INFERPLANE_HAS_AVX512_VNNI ? 2 : 1;
using Ints = __m512i;
using Floats = __m512;
inline Ints load_codes(const uint8_t* from) { return _mm512_load_si512(from); }
template <int kShift, int kBits>
inline Ints pair_of(Ints words) {
  constexpr int kMask = (1 << kBits) - 1;
  if constexpr (kShift > 0) words = _mm512_srli_epi16(words, kShift);
  if constexpr (kShift + kBits < 16) words = _mm512_and_si512(words, _mm512_set1_epi16(kMask));
  return words;
}
inline Ints add_products(Ints sum, Ints codes, Ints pair) {
  return _mm512_add_epi32(sum, _mm512_madd_epi16(codes, pair));
}
#if INFERPLANE_HAS_AVX512_VNNI
// Codes of a part of each word as bytes, and their products with the bytes of a plane of activations.
template <int kPart, int kBits>
inline Ints bytes_of(Ints words) {
  if constexpr (kBits == 8) return words;
  if constexpr (kPart > 0) words = _mm512_srli_epi16(words, 4);
  return _mm512_and_si512(words, _mm512_set1_epi8(15));
}
inline Ints add_byte_products(Ints sum, Ints codes, Ints fours) {
  return _mm512_dpbusd_epi32(sum, codes, fours);
}
inline Ints join_planes(Ints high, Ints low) { return _mm512_add_epi32(_mm512_slli_epi32(high, 8), low); }
#endif
inline Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Ints all_ints(int32_t value) { return _mm512_set1_epi32(value); }
inline Floats all_floats(float value) { return _mm512_set1_ps(value); }
inline Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats as_floats(Ints values) { return _mm512_cvtepi32_ps(values); }
inline Floats load_scales(const uint8_t* from, bool are_wide) {
  if (are_wide) return _mm512_loadu_ps(from);
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
inline void store_floats(float* to, Floats values) { _mm512_storeu_ps(to, values); }
#else
constexpr int kLanes = 8;
constexpr int kMaxRows = 4, kStripsAtOnce = 1;
using Ints = __m256i;
using Floats = __m256;
inline Ints load_codes(const uint8_t* from) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(from)); }
template <int kShift, int kBits>
inline Ints pair_of(Ints words) {
  constexpr int kMask = (1 << kBits) - 1;
  if constexpr (kShift > 0) words = _mm256_srli_epi16(words, kShift);
  if constexpr (kShift + kBits < 16) words = _mm256_and_si256(words, _mm256_set1_epi16(kMask));
  return words;
}
inline Ints add_products(Ints sum, Ints codes, Ints pair) {
  return _mm256_add_epi32(sum, _mm256_madd_epi16(codes, pair));
}
inline Ints add(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
inline Ints all_ints(int32_t value) { return _mm256_set1_epi32(value); }
inline Floats all_floats(float value) { return _mm256_set1_ps(value); }
inline Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats as_floats(Ints values) { return _mm256_cvtepi32_ps(values); }
inline Floats load_scales(const uint8_t* from, bool are_wide) {
  if (are_wide) return _mm256_loadu_ps(reinterpret_cast<const float*>(from));
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline void store_floats(float* to, Floats values) { _mm256_storeu_ps(to, values); }
#endif

#if INFERPLANE_HAS_AVX512_VNNI
constexpr bool kInBytes = true;
constexpr float kLargest = 127 * 256 + 127;  // whose high byte is 127
#else
constexpr bool kInBytes = false;
constexpr float kLargest = 32767;
#endif

// Of so few rows the products are quicker than memory, and the processor itself fetches too little ahead.
constexpr int kMostFetchingRows = INFERPLANE_HAS_AVX512_BF16 ? 0 : 4;
constexpr int kFetchAhead = 2048;

// A row of activations in fixed point.
struct FixedRow {
  int16_t* values;  // [num_units * unit]; in bytes: for each word of codes the high ones in their order, then the low
  int32_t* start;   // [num_units]: what the zero of the codes takes from a unit's sum
  float* scale;     // [num_units]
  float* sum;       // [num_units]: of the unit's activations, for the minimums
};

struct FixedRows {
  char* memory;
  int64_t values_bytes, row_bytes;
  int num_units;

  FixedRows(const QuantizedMatrix& w, int64_t num_rows) : num_units(w.num_units) {
    values_bytes = (int64_t(w.num_units) * w.unit * 2 + 63) / 64 * 64 + 64;  // a unit of 16 is written as one of 32
    row_bytes = values_bytes + (int64_t(w.num_units) * 12 + 63) / 64 * 64;
    memory = static_cast<char*>(region_scratch(size_t(row_bytes * num_rows)));
  }
  FixedRow row(int64_t index) const {
    char* at = memory + index * row_bytes;
    auto start = reinterpret_cast<int32_t*>(at + values_bytes);
    auto scale = reinterpret_cast<float*>(start + num_units);
    return {reinterpret_cast<int16_t*>(at), start, scale, scale + num_units};
  }
};

#if INFERPLANE_HAS_AVX512_VNNI
// Writes 32 values in the order in which the bytes of words of codes meet them; returns their sum.
inline int32_t store_fixed(int bits, Vec low16, Vec high16, float inverse, uint8_t* out) {
  __m512i first = _mm512_cvtps_epi32((low16 * all_of(inverse)).all);
  __m512i second = _mm512_cvtps_epi32((high16 * all_of(inverse)).all);
  __m512i values = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(first)),
                                      _mm512_cvtepi32_epi16(second), 1);
  __m256i high = _mm512_cvtepi16_epi8(_mm512_srai_epi16(_mm512_add_epi16(values, _mm512_set1_epi16(128)), 8));
  __m256i low = _mm512_cvtepi16_epi8(values);
  if (bits == 4) {  // columns 0, 4, 1, 5 have the low halves of a word's bytes, 2, 6, 3, 7 the high ones
    const __m256i order = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15));
    const __m512i turns = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11);
    _mm512_storeu_si512(out, _mm512_permutex2var_epi64(_mm512_castsi256_si512(_mm256_shuffle_epi8(high, order)), turns,
                                                       _mm512_castsi256_si512(_mm256_shuffle_epi8(low, order))));
  } else {
    const __m256i order = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15));
    const __m512i turns = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    _mm512_storeu_si512(out, _mm512_permutex2var_epi32(_mm512_castsi256_si512(_mm256_shuffle_epi8(high, order)), turns,
                                                       _mm512_castsi256_si512(_mm256_shuffle_epi8(low, order))));
  }
  return _mm512_reduce_add_epi32(_mm512_add_epi32(first, second));
}
#endif

// The largest magnitude, as bits, which order as magnitudes do: not a number is above infinity.
inline uint32_t largest_of(Vec a, Vec b) {
#if INFERPLANE_HAS_AVX512
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  return _mm512_reduce_max_epu32(_mm512_max_epu32(_mm512_and_si512(_mm512_castps_si512(a.all), magnitude),
                                                  _mm512_and_si512(_mm512_castps_si512(b.all), magnitude)));
#else
  float values[32];
  store_both(values, a, b);
  uint32_t largest = 0, bits[32];
  std::memcpy(bits, values, sizeof bits);
  for (uint32_t each : bits) {
    uint32_t magnitude = each & 0x7fffffff;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
#endif
}

template <class X>
void fix_row(const QuantizedMatrix& w, const X* x, const FixedRow& out) {
  for (int unit = 0; unit < w.num_units; ++unit) {
    int64_t begin = int64_t(unit) * w.unit;
    int size = int(w.in_features - begin < w.unit ? w.in_features - begin : w.unit);
    auto sixteen = [&](int at) {
      return size - at >= 16 ? load(x + begin + at) : size > at ? load(x + begin + at, size - at) : all_of(0);
    };
    Vec first = sixteen(0), second = sixteen(16);
    uint32_t largest = largest_of(first, second);
    float scale;
    std::memcpy(&scale, &largest, 4);
    scale *= 1 / kLargest;
    float inverse = scale > 1e-37f ? 1 / scale : 0;  // below, it would overflow
    if (largest >= 0x7f800000) {  // infinite or not a number, which the result has to be as well
      scale = __builtin_nanf("");
      inverse = 0;
      first = second = all_of(0);
    }
    int16_t* values = out.values + begin;
#if INFERPLANE_HAS_AVX512_VNNI
    int32_t sum = store_fixed(w.bits, first, second, inverse, reinterpret_cast<uint8_t*>(values));
#else
    float wide[32];
    store_both(wide, first * all_of(inverse), second * all_of(inverse));
    int32_t sum = 0;
    for (int i = 0; i < w.unit; ++i) {
      auto value = int32_t(__builtin_rintf(wide[i]));
      values[i] = int16_t(value);
      sum += value;
    }
#endif
    out.start[unit] = -w.zero * sum;
    out.scale[unit] = scale;
    out.sum[unit] = scale * float(sum);
  }
}

// kLanes rows of kStripsAtOnce strips. out: [strips][kRowsAtOnce][kStrip].
template <int kBits, int kUnit, int kRows>
void multiply_lanes(const QuantizedMatrix& w, const uint8_t* const* strips, int first_lane, const FixedRow* rows,
                    bool fetches, float* out) {
  constexpr int kColumns = 32 / kBits, kWords = kUnit / kColumns;
  [[maybe_unused]] constexpr int kParts = 8 / kBits;
  constexpr int kChains = kInBytes || kRows <= 2 ? 2 : 1;
  const uint8_t* codes[kStripsAtOnce];
  for (int s = 0; s < kStripsAtOnce; ++s) codes[s] = strips[s] + first_lane * 4;
  int64_t scales = w.scale_offset + first_lane * w.scale_bytes;
  int64_t minimums = w.minimum_offset + first_lane * w.scale_bytes;
  int units_per_group = w.group / kUnit, left = 0;
  Floats total[kStripsAtOnce][kRows], scale[kStripsAtOnce], minimum[kStripsAtOnce];
  for (int s = 0; s < kStripsAtOnce; ++s) {
    scale[s] = minimum[s] = all_floats(0);
    for (int row = 0; row < kRows; ++row) total[s][row] = all_floats(0);
  }
  const int16_t* x[kRows];
  for (int row = 0; row < kRows; ++row) x[row] = rows[row].values;
  for (int unit = 0; unit < w.num_units; ++unit) {
    if (left == 0) {
      for (int s = 0; s < kStripsAtOnce; ++s) {
        scale[s] = load_scales(strips[s] + scales, w.scale_bytes == 4);
        if (w.has_minimum) minimum[s] = load_scales(strips[s] + minimums, w.scale_bytes == 4);
      }
      scales += kStrip * w.scale_bytes;
      minimums += kStrip * w.scale_bytes;
      left = units_per_group;
    }
    --left;
    Ints sum[kStripsAtOnce][kRows][kChains];
    for (int s = 0; s < kStripsAtOnce; ++s)
      for (int row = 0; row < kRows; ++row)
        for (int chain = 0; chain < kChains; ++chain)
          sum[s][row][chain] = all_ints(chain == 0 ? rows[row].start[unit] : 0);
    if constexpr (kRows <= kMostFetchingRows) {
      if (fetches)
        for (int s = 0; s < kStripsAtOnce; ++s)
          for (int at = 0; at < kWords * kStrip * 4; at += 64) _mm_prefetch(codes[s] + kFetchAhead + at, _MM_HINT_T0);
    }
#pragma GCC unroll 8
    for (int word = 0; word < kWords; ++word) {
      Ints packed[kStripsAtOnce];
      for (int s = 0; s < kStripsAtOnce; ++s) packed[s] = load_codes(codes[s] + word * kStrip * 4);
      auto activations = [&](int row, int index) {
        int32_t found;
        std::memcpy(&found, x[row] + word * kColumns + 2 * index, 4);
        return all_ints(found);
      };
#if INFERPLANE_HAS_AVX512_VNNI
      auto add_part = [&](auto part) {
        constexpr int kPart = decltype(part)::value;
        Ints bytes[kStripsAtOnce];
        for (int s = 0; s < kStripsAtOnce; ++s) bytes[s] = bytes_of<kPart, kBits>(packed[s]);
        for (int row = 0; row < kRows; ++row) {
          Ints low = activations(row, kParts + kPart), high = activations(row, kPart);
          for (int s = 0; s < kStripsAtOnce; ++s) {
            sum[s][row][0] = add_byte_products(sum[s][row][0], bytes[s], low);
            sum[s][row][1] = add_byte_products(sum[s][row][1], bytes[s], high);
          }
        }
      };
      add_part(std::integral_constant<int, 0>{});
      if constexpr (kParts == 2) add_part(std::integral_constant<int, 1>{});
#else
      auto add_pair = [&](auto pair) {
        constexpr int kIndex = decltype(pair)::value;
        for (int s = 0; s < kStripsAtOnce; ++s) {
          Ints codes_of_pair = pair_of<kIndex * kBits, kBits>(packed[s]);
          for (int row = 0; row < kRows; ++row) {
            Ints& chain = sum[s][row][kIndex % kChains];
            chain = add_products(chain, codes_of_pair, activations(row, kIndex));
          }
        }
      };
      add_pair(std::integral_constant<int, 0>{});
      add_pair(std::integral_constant<int, 1>{});
      if constexpr (kBits == 4) {
        add_pair(std::integral_constant<int, 2>{});
        add_pair(std::integral_constant<int, 3>{});
      }
#endif
    }
    for (int s = 0; s < kStripsAtOnce; ++s) codes[s] += kWords * kStrip * 4;
    for (int row = 0; row < kRows; ++row) x[row] += kUnit;
    for (int s = 0; s < kStripsAtOnce; ++s)
      for (int row = 0; row < kRows; ++row) {
        Ints* chains = sum[s][row];
#if INFERPLANE_HAS_AVX512_VNNI
        Ints all = join_planes(chains[1], chains[0]);
#else
        Ints all = kChains == 1 ? chains[0] : add(chains[0], chains[kChains - 1]);
#endif
        total[s][row] =
            multiply_add(as_floats(all), multiply(scale[s], all_floats(rows[row].scale[unit])), total[s][row]);
      }
    if (w.has_minimum)
      for (int s = 0; s < kStripsAtOnce; ++s)
        for (int row = 0; row < kRows; ++row)
          total[s][row] = multiply_add(minimum[s], all_floats(rows[row].sum[unit]), total[s][row]);
  }
  for (int s = 0; s < kStripsAtOnce; ++s)
    for (int row = 0; row < kRows; ++row)
      store_floats(out + (s * kRowsAtOnce + row) * kStrip + first_lane, total[s][row]);
}

template <int kBits, int kUnit>
void multiply_strips(const QuantizedMatrix& w, const uint8_t* const* strips, const FixedRow* rows, int num_rows,
                     float* out) {
  bool fetches = num_rows <= kMostFetchingRows;
  while (num_rows > 0) {
    int taken = num_rows >= kMaxRows ? kMaxRows : num_rows < 4 ? num_rows : 4;
    for (int lane = 0; lane < kStrip; lane += kLanes) {
      auto multiply = [&](auto count) {
        constexpr int kRows = decltype(count)::value;
        multiply_lanes<kBits, kUnit, kRows>(w, strips, lane, rows, fetches && lane == 0, out);
      };
      switch (taken) {
        case 1: multiply(std::integral_constant<int, 1>{}); break;
        case 2: multiply(std::integral_constant<int, 2>{}); break;
        case 3: multiply(std::integral_constant<int, 3>{}); break;
        case 4: multiply(std::integral_constant<int, 4>{}); break;
        default: multiply(std::integral_constant<int, kMaxRows>{});
      }
    }
    rows += taken;
    out += taken * kStrip;
    num_rows -= taken;
  }
}

using MultiplyStrips = void (*)(const QuantizedMatrix&, const uint8_t* const*, const FixedRow*, int, float*);

MultiplyStrips strips_function(const QuantizedMatrix& w) {
  if (w.bits == 4) return w.unit == 32 ? multiply_strips<4, 32> : multiply_strips<4, 16>;
  return w.unit == 32 ? multiply_strips<8, 32> : multiply_strips<8, 16>;
}

}  // namespace

template <class X>
void multiply_few_rows(const QuantizedMatrix& w, const Rows<X>& x) {
  FixedRows fixed(w, x.num_rows);
  auto fix = [&](int64_t row) {
    X* room = x.norm == nullptr ? nullptr : static_cast<X*>(thread_scratch(w.in_features * sizeof(X)));
    fix_row(w, x.row(w, row, room), fixed.row(row));
  };
  if (x.num_rows < 32)
    for (int64_t row = 0; row < x.num_rows; ++row) fix(row);
  else
    parallel(int(x.num_rows), [&](int row, int) { fix(row); });
  MultiplyStrips multiply = strips_function(w);
  // strips of the result that are computed together: a gate and its value are a pair already
  int num_strips = x.num_strips(w), together = x.is_gated ? 1 : kStripsAtOnce;
  int num_turns = (num_strips + together - 1) / together;
  int num_tasks = 4 * num_threads() < num_turns ? 4 * num_threads() : num_turns;
  parallel(num_tasks, [&](int task, int) {
    int begin = together * int(int64_t(num_turns) * task / num_tasks);
    int end = together * int(int64_t(num_turns) * (task + 1) / num_tasks);
    if (end > num_strips) end = num_strips;
    for (int64_t first_row = 0; first_row < x.num_rows; first_row += kRowsAtOnce) {
      int taken = int(x.num_rows - first_row < kRowsAtOnce ? x.num_rows - first_row : kRowsAtOnce);
      FixedRow rows[kRowsAtOnce];
      for (int row = 0; row < taken; ++row) rows[row] = fixed.row(first_row + row);
      for (int strip = begin; strip < end; strip += together) {
        constexpr int kSums = kRowsAtOnce * kStrip;
        alignas(64) float sums[2 * kSums];
        int size = end - strip < together ? end - strip : together;  // the last strip may have no neighbour
        const uint8_t* first = w.strips + strip * w.strip_bytes;
        const uint8_t* strips[2] = {first, first + (x.is_gated ? num_strips : size - 1) * w.strip_bytes};
        for (int at = 0; at < together * x.strips_each(); at += kStripsAtOnce)
          multiply(w, strips + at, rows, taken, sums + at * kSums);
        for (int row = 0; row < taken; ++row)
          for (int i = 0; i < size; ++i)
            x.write(w, first_row + row, strip + i, sums + i * kSums + row * kStrip, kSums, nullptr);
      }
    }
  });
}

template void multiply_few_rows(const QuantizedMatrix&, const Rows<bf16>&);
template void multiply_few_rows(const QuantizedMatrix&, const Rows<float>&);

}  // namespace inferplane::INFERPLANE_LEVEL
