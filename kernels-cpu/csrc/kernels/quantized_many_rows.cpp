// Many rows of activations times a quantized matrix, with AMX, in whole numbers of 16 bits: each row of activations has a
// scale for each part of its depth, each row of the matrix one. A number is 256 times a high byte and a signed low byte, and
// tiles multiply the bytes: high by high, high by low, low by high. Low by low would be below what rounding to 16 bits does.
// Strips of the matrix become such bytes in a buffer that stays in the core's cache, and are multiplied by all rows before
// the next ones.
#include "amx.h"
#include "kernel.h"
#include "quantized.h"
#include "vec.h"

#if INFERPLANE_HAS_AMX

namespace inferplane::INFERPLANE_LEVEL {
namespace {

constexpr int kDepth = 64;                      // columns of a tile of bytes
constexpr int kTile = 16;                       // its rows
constexpr int64_t kTileBytes = kTile * kDepth;  // 1 KB
constexpr int64_t kStepBytes = 2 * kTileBytes;  // of high bytes, then of low ones
constexpr int64_t kPanelBytes = 512 << 10;      // of strips as bytes: a part of the second-level cache
constexpr int kMostSteps = 6;  // of depth, with a scale for each row: 32 rows and a strip fit in the first-level cache

constexpr float kLargest = 127 * 256 + 127;  // whose high byte is 127
// Of the matrix: what is left keeps the factors of codes, whose span of 16 or more is twice that, in 16 bits.
constexpr float kLargestWeight = 30000;

// Tiles' bytes of the depth lie in the order in which halves of words of codes give them: column 0, 2, 1, 3 of each four.
inline __m128i in_tile_order(__m128i bytes) {
  return _mm_shuffle_epi8(bytes, _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15));
}

// x as tiles: [blocks of 16 rows][steps][high, low][16][64] bytes, and [blocks of 16 rows][parts][16] scales.
struct FixedBlocks {
  char* tiles;
  float* scales;
  int num_steps, num_parts, steps_per_part;

  FixedBlocks(int64_t num_rows, int64_t in_features) {
    num_steps = int((in_features + kDepth - 1) / kDepth);
    num_parts = (num_steps + kMostSteps - 1) / kMostSteps;
    steps_per_part = (num_steps + num_parts - 1) / num_parts;
    num_parts = (num_steps + steps_per_part - 1) / steps_per_part;
    int64_t blocks = (num_rows + kTile - 1) / kTile;
    tiles = static_cast<char*>(region_scratch(size_t(blocks * (num_steps * kStepBytes + num_parts * kTile * 4))));
    scales = reinterpret_cast<float*>(tiles + blocks * num_steps * kStepBytes);
  }

  const char* block(int64_t index) const { return tiles + index * num_steps * kStepBytes; }
  const float* block_scales(int64_t index) const { return scales + index * num_parts * kTile; }

  template <class X>
  void fix_block(const QuantizedMatrix& w, const Rows<X>& x, int64_t index) const {
    X* room = x.norm == nullptr ? nullptr : static_cast<X*>(thread_scratch(w.in_features * sizeof(X)));
    for (int row = 0; row < kTile; ++row) {
      int64_t at = index * kTile + row;
      char* to = tiles + index * num_steps * kStepBytes + row * kDepth;
      float* scale = scales + index * num_parts * kTile + row;
      const X* values = at < x.num_rows ? x.row(w, at, room) : nullptr;
      for (int part = 0; part < num_parts; ++part) {
        int first = part * steps_per_part, end = first + steps_per_part < num_steps ? first + steps_per_part : num_steps;
        if (values != nullptr)
          scale[part * kTile] = fix_part(values, w.in_features, first, end, to);
        else
          clear_part(first, end, to);
      }
    }
  }

 private:
  template <class X>
  static Vec load_up_to(const X* row, int64_t column, int64_t in_features) {
    int64_t n = in_features - column;
    return n >= 16 ? load(row + column) : n > 0 ? load(row + column, int(n)) : all_of(0);
  }

  // Returns the scale, which is no number where one of the activations is none or infinite.
  template <class X>
  static float fix_part(const X* row, int64_t in_features, int first_step, int end_step, char* to) {
    __m512i largest = _mm512_setzero_si512();
    for (int64_t column = first_step * kDepth; column < end_step * kDepth; column += 16) {
      __m512i bits = _mm512_castps_si512(load_up_to(row, column, in_features).all);
      largest = _mm512_max_epu32(largest, _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)));
    }
    uint32_t bits = _mm512_reduce_max_epu32(largest);
    if (bits >= 0x7f800000) {
      clear_part(first_step, end_step, to);
      return __builtin_nanf("");
    }
    float scale;
    std::memcpy(&scale, &bits, 4);
    scale *= 1 / kLargest;
    __m512 inverse = _mm512_set1_ps(scale > 1e-37f ? 1 / scale : 0);  // below, it would overflow
    for (int step = first_step; step < end_step; ++step)
      for (int at = 0; at < kDepth; at += 16) {
        Vec values = load_up_to(row, int64_t(step) * kDepth + at, in_features);
        __m512i fixed = _mm512_cvtps_epi32(_mm512_mul_ps(values.all, inverse));
        __m512i high = _mm512_srai_epi32(_mm512_add_epi32(fixed, _mm512_set1_epi32(128)), 8);
        auto out = reinterpret_cast<__m128i*>(to + step * kStepBytes + at);
        _mm_store_si128(out, in_tile_order(_mm512_cvtepi32_epi8(high)));
        _mm_store_si128(out + kTileBytes / 16, in_tile_order(_mm512_cvtepi32_epi8(fixed)));
      }
    return scale;
  }

  static void clear_part(int first_step, int end_step, char* to) {
    for (int step = first_step; step < end_step; ++step)
      for (int64_t plane = 0; plane < kStepBytes; plane += kTileBytes)
        _mm512_storeu_si512(to + step * kStepBytes + plane, _mm512_setzero_si512());
  }
};

inline __m512 load_scales(const uint8_t* from, bool is_wide) {
  if (is_wide) return _mm512_loadu_ps(from);
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

// Scale and minimum of groups of a strip's columns, one group after the other.
class Groups {
 public:
  Groups(const QuantizedMatrix& w, const uint8_t* strip)
      : scales_(strip + w.scale_offset), minimums_(strip + w.minimum_offset), w_(w) {}

  void next(__m512& scale, __m512& minimum) {
    scale = load_scales(scales_, w_.scale_bytes == 4);
    scales_ += kStrip * w_.scale_bytes;
    minimum = w_.has_minimum ? load_scales(minimums_, w_.scale_bytes == 4) : _mm512_setzero_ps();
    minimums_ += kStrip * w_.scale_bytes;
  }

 private:
  const uint8_t *scales_, *minimums_;
  const QuantizedMatrix& w_;
};

// The largest magnitude that codes of each row of a strip can have.
inline __m512 largest_of(const QuantizedMatrix& w, const uint8_t* strip) {
  int middle = 1 << (w.bits - 1), span = middle >> w.spare_bits;
  __m512 lowest = _mm512_set1_ps(float(middle - span - w.zero)), highest = _mm512_set1_ps(float(middle + span - 1 - w.zero));
  __m512 largest = _mm512_setzero_ps(), scale, minimum;
  Groups groups(w, strip);
  for (int64_t column = 0; column < w.in_features; column += w.group) {
    groups.next(scale, minimum);
    largest = _mm512_max_ps(largest, _mm512_abs_ps(_mm512_fmadd_ps(lowest, scale, minimum)));
    largest = _mm512_max_ps(largest, _mm512_abs_ps(_mm512_fmadd_ps(highest, scale, minimum)));
  }
  return largest;
}

inline __m512i in_both_halves(__m512 values) {
  __m512i whole = _mm512_cvtps_epi32(values);
  return _mm512_mask_blend_epi16(0xaaaaaaaau, whole, _mm512_slli_epi32(whole, 16));
}

// Two columns of each row as 16-bit numbers, of codes whose middle is 0 in the highest bits.
inline __m512i fixed_pair(__m512i codes, __m512i factor, __m512i offset) {
  return _mm512_add_epi16(_mm512_mulhrs_epi16(codes, factor), offset);
}

// Columns 0 and 1, and 2 and 3, as high and low bytes.
inline void store_bytes(__m512i first, __m512i second, char* high) {
  constexpr int kSelect = 0xca;
  const __m512i lows = _mm512_set1_epi16(0x00ff), half = _mm512_set1_epi16(128);
  __m512i low = _mm512_ternarylogic_epi32(lows, first, _mm512_slli_epi16(second, 8), kSelect);
  first = _mm512_srli_epi16(_mm512_add_epi16(first, half), 8);
  second = _mm512_add_epi16(second, half);
  _mm512_store_si512(high, _mm512_ternarylogic_epi32(lows, first, second, kSelect));
  _mm512_store_si512(high + kTileBytes, low);
}

// A strip as tiles: [steps][high, low][16 fours of columns][16 rows][4] bytes. What lies beyond the last unit stays as it
// was: activations are 0 there. Returns the scales of the strip's rows.
template <int kBits>
__m512 fix_strip(const QuantizedMatrix& w, const uint8_t* strip, char* tiles) {
  constexpr int kColumns = 32 / kBits, kMiddle = 1 << (kBits - 1), kAndXor = 0x6a;
  const __m512i top = _mm512_set1_epi16(int16_t(0xffff << (16 - kBits))), flip = _mm512_set1_epi16(int16_t(0x8000));
  const __m128i first_shift = _mm_cvtsi32_si128(8 + w.spare_bits), second_shift = _mm_cvtsi32_si128(w.spare_bits);
  __m512 step = _mm512_mul_ps(largest_of(w, strip), _mm512_set1_ps(1 / kLargestWeight));
  __m512 inverse = _mm512_maskz_div_ps(_mm512_cmp_ps_mask(step, _mm512_set1_ps(1e-37f), _CMP_GT_OQ), _mm512_set1_ps(1), step);
  // a product's highest 16 bits are taken: of a code that begins at the highest bit, and a factor as many times too large
  __m512 to_factor = _mm512_mul_ps(inverse, _mm512_set1_ps(float(kMiddle >> w.spare_bits))), middle = _mm512_set1_ps(float(kMiddle - w.zero));
  __m512i factor = _mm512_setzero_si512(), offset = factor;
  Groups groups(w, strip);
  int words = w.unit / kColumns, units_per_group = w.group / w.unit, left = 0, four = 0;
  for (int unit = 0; unit < w.num_units; ++unit) {
    if (left == 0) {
      __m512 scale, minimum;
      groups.next(scale, minimum);
      factor = in_both_halves(_mm512_mul_ps(scale, to_factor));
      offset = in_both_halves(_mm512_mul_ps(_mm512_fmadd_ps(middle, scale, minimum), inverse));
      left = units_per_group;
    }
    --left;
    char* out = tiles + four / kTile * kStepBytes + four % kTile * kDepth;
    for (int word = 0; word < words; ++word) {
      __m512i packed = _mm512_load_si512(strip);
      strip += kStrip * 4;
      if constexpr (kBits == 4) {
        auto pair = [&](__m512i codes) {
          return fixed_pair(_mm512_ternarylogic_epi32(codes, top, flip, kAndXor), factor, offset);
        };
        store_bytes(pair(_mm512_slli_epi16(packed, 12)), pair(_mm512_slli_epi16(packed, 8)), out);
        store_bytes(pair(_mm512_slli_epi16(packed, 4)), pair(packed), out + kDepth);
        out += 2 * kDepth;
      } else {
        packed = _mm512_xor_si512(packed, _mm512_set1_epi8(int8_t(0x80)));
        __m512i first = _mm512_sll_epi16(packed, first_shift);
        __m512i second = _mm512_sll_epi16(_mm512_and_si512(packed, top), second_shift);
        store_bytes(fixed_pair(first, factor, offset), fixed_pair(second, factor, offset), out);
        out += kDepth;
      }
    }
    four += w.unit / 4;
  }
  return step;
}

// Products of one or two blocks of rows with a strip over some steps.
struct Products {
  alignas(64) int32_t high[2 * kTile * kStrip], mixed[2 * kTile * kStrip];
};

template <int kBlocks>
void multiply_steps(const char* x, int64_t block_bytes, const char* strip, int num_steps, Products& out) {
  _tile_zero(0);
  _tile_zero(1);
  if (kBlocks > 1) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int step = 0; step < num_steps; ++step, x += kStepBytes, strip += kStepBytes) {
    _tile_loadd(4, x, kDepth);
    _tile_stream_loadd(6, strip, kDepth);  // the hint keeps the rows in the first-level cache
    _tile_dpbssd(0, 4, 6);
    _tile_stream_loadd(7, strip + kTileBytes, kDepth);
    _tile_dpbssd(1, 4, 7);
    _tile_loadd(5, x + kTileBytes, kDepth);
    if (kBlocks > 1) {
      _tile_loadd(4, x + block_bytes, kDepth);
      _tile_dpbssd(2, 4, 6);
      _tile_dpbssd(3, 4, 7);
    }
    _tile_dpbssd(1, 5, 6);
    if (kBlocks > 1) {
      _tile_loadd(5, x + block_bytes + kTileBytes, kDepth);
      _tile_dpbssd(3, 5, 6);
    }
  }
  _tile_stored(0, out.high, 64);
  _tile_stored(1, out.mixed, 64);
  if (kBlocks > 1) {
    _tile_stored(2, out.high + kTile * kStrip, 64);
    _tile_stored(3, out.mixed + kTile * kStrip, 64);
  }
}

// sums: [16 * num_blocks][16], of a part of the depth or, if `adds`, of the parts before as well.
void add_part(const FixedBlocks& x, int block, int num_blocks, int part, const char* strip, bool adds, float* sums) {
  int first = part * x.steps_per_part;
  int steps = x.num_steps - first < x.steps_per_part ? x.num_steps - first : x.steps_per_part;
  const char *left = x.block(block) + first * kStepBytes, *right = strip + first * kStepBytes;
  Products products;
  if (num_blocks > 1)
    multiply_steps<2>(left, x.num_steps * kStepBytes, right, steps, products);
  else
    multiply_steps<1>(left, 0, right, steps, products);
  for (int i = 0; i < num_blocks; ++i) {
    const float* scales = x.block_scales(block + i) + part * kTile;
    for (int row = 0; row < kTile; ++row) {
      int at = (i * kTile + row) * kStrip;
      __m512 high = _mm512_cvtepi32_ps(_mm512_load_si512(products.high + at));
      __m512 mixed = _mm512_cvtepi32_ps(_mm512_load_si512(products.mixed + at));
      __m512 sum = _mm512_fmadd_ps(high, _mm512_set1_ps(256), mixed), scale = _mm512_set1_ps(scales[row]);
      _mm512_store_ps(sums + at, adds ? _mm512_fmadd_ps(sum, scale, _mm512_load_ps(sums + at)) : _mm512_mul_ps(sum, scale));
    }
  }
}

}  // namespace

template <class X>
void multiply_many_rows(const QuantizedMatrix& w, const Rows<X>& x) {
  FixedBlocks fixed(x.num_rows, w.in_features);
  int num_blocks = int((x.num_rows + kTile - 1) / kTile);
  parallel(num_blocks, [&](int block, int) { fixed.fix_block(w, x, block); });
  int num_strips = x.num_strips(w), each = x.strips_each(), threads = num_threads();
  int64_t strip_bytes = fixed.num_steps * kStepBytes;
  int most = kPanelBytes < each * strip_bytes ? 1 : int(kPanelBytes / (each * strip_bytes));
  int num_parts = threads * ((num_strips + most * threads - 1) / (most * threads));
  int strips_per_part = (num_strips + num_parts - 1) / num_parts;
  num_parts = (num_strips + strips_per_part - 1) / strips_per_part;
  // more threads than parts of the matrix share its parts by rows
  int row_parts = num_parts < threads ? (threads + num_parts - 1) / num_parts : 1;
  int blocks_per_part = ((num_blocks + row_parts - 1) / row_parts + 1) / 2 * 2;
  row_parts = (num_blocks + blocks_per_part - 1) / blocks_per_part;
  parallel(num_parts * row_parts, [&](int task, int) {
    int first_strip = task / row_parts * strips_per_part;
    int strips = num_strips - first_strip < strips_per_part ? num_strips - first_strip : strips_per_part;
    int first_block = task % row_parts * blocks_per_part, count = strips * each;
    int end_block = first_block + blocks_per_part < num_blocks ? first_block + blocks_per_part : num_blocks;
    constexpr int kSums = 2 * kTile * kStrip;
    auto sums = static_cast<float*>(thread_scratch(size_t(count * (strip_bytes + (kSums + kStrip) * 4))));
    float* scales = sums + count * kSums;
    auto panel = reinterpret_cast<char*>(scales + count * kStrip);
    for (int i = 0; i < count; ++i) {
      const uint8_t* packed = w.strips + (first_strip + i / each + i % each * num_strips) * w.strip_bytes;
      char* tiles = panel + i * strip_bytes;
      __m512 scale = w.bits == 4 ? fix_strip<4>(w, packed, tiles) : fix_strip<8>(w, packed, tiles);
      _mm512_store_ps(scales + i * kStrip, _mm512_mul_ps(scale, _mm512_set1_ps(256)));
    }
    asm volatile("" ::: "memory");  // the compiler is not told what the tiles' instructions read
    Tiles tiles;
    for (int block = first_block; block < end_block; block += 2) {
      int taken = block + 1 < end_block ? 2 : 1;
      for (int part = 0; part < fixed.num_parts; ++part)
        for (int i = 0; i < count; ++i)
          add_part(fixed, block, taken, part, panel + i * strip_bytes, part > 0, sums + i * kSums);
      for (int row = 0; row < taken * kTile && block * kTile + row < x.num_rows; ++row)
        for (int strip = 0; strip < strips; ++strip)
          x.write(w, block * kTile + row, first_strip + strip, sums + strip * each * kSums + row * kStrip, kSums,
                  scales + strip * each * kStrip);
    }
  });
}

template void multiply_many_rows(const QuantizedMatrix&, const Rows<bf16>&);
template void multiply_many_rows(const QuantizedMatrix&, const Rows<float>&);

}  // namespace inferplane::INFERPLANE_LEVEL

#endif
