// Many rows of activations times a quantized matrix, with AMX: strips of the matrix become bfloat16 in the order of its tiles,
// in a buffer that stays in the core's cache, and are multiplied by all rows before the next ones.
#include "kernel.h"
#include "quantized.h"

#if INFERPLANE_HAS_AMX

namespace inferplane::INFERPLANE_LEVEL {
namespace {

constexpr int kDepth = 32;                          // columns of a tile of bfloat16
constexpr int kTile = 16;                           // its rows
constexpr int64_t kTileBytes = kTile * kDepth * 2;  // 1 KB
constexpr int64_t kPanelBytes = 512 << 10;          // of bfloat16 strips: a part of the second-level cache

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  // Tiles 0 to 3 are sums, 4 and 5 of activations, 6 and 7 of weights.
  TileConfig(int upper_rows, int lower_rows) {
    for (int tile = 0; tile < 8; ++tile) row_bytes[tile] = 64;
    rows[0] = rows[1] = rows[4] = uint8_t(upper_rows);
    rows[2] = rows[3] = rows[5] = uint8_t(lower_rows > 0 ? lower_rows : 1);
    rows[6] = rows[7] = kTile;
  }
};

void configure(const TileConfig& config) {
  asm volatile("" ::"r"(&config) : "memory");  // gcc 12 believes that only the first 8 bytes are read
  _tile_loadconfig(&config);
}

inline __m512i as_pairs(__m512 even, __m512 odd) {
  const __m512i half = _mm512_set1_epi32(0x8000);
  alignas(64) static constexpr uint16_t kHighs[32] = {
      1,  33, 3,  35, 5,  37, 7,  39, 9,  41, 11, 43, 13, 45, 15, 47,
      17, 49, 19, 51, 21, 53, 23, 55, 25, 57, 27, 59, 29, 61, 31, 63,
  };
  return _mm512_permutex2var_epi16(_mm512_add_epi32(_mm512_castps_si512(even), half), _mm512_load_si512(kHighs),
                                   _mm512_add_epi32(_mm512_castps_si512(odd), half));
}

// 256 plus the code of 8 bits that lies in bits 15 to 22.
inline __m512 raised(__m512i codes) {
  constexpr int kAndOr = 0xea;
  return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(codes, _mm512_set1_epi32(255 << 15),
                                                       _mm512_set1_epi32(0x43800000), kAndOr));
}

inline __m512 load_scales(const uint8_t* from, bool is_wide) {
  if (is_wide) return _mm512_loadu_ps(from);
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

// A strip as tiles: [ceil(in_features / 32)][16 pairs of columns][16 rows][2] bfloat16.
template <int kBits>
void widen_strip(const QuantizedMatrix& w, const uint8_t* strip, char* tiles) {
  constexpr int kColumns = 32 / kBits;
  const uint8_t* codes = strip;
  const uint8_t* scales = strip + w.scale_offset;
  const uint8_t* minimums = strip + w.minimum_offset;
  bool is_wide = w.scale_bytes == 4;
  alignas(64) float table[16];
  for (int code = 0; code < 16; ++code) table[code] = float(code - w.zero);
  const __m512 values = _mm512_load_ps(table), below = _mm512_set1_ps(kBits == 8 ? -float(256 + w.zero) : 0.0f);
  int words = w.unit / kColumns, units_per_group = w.group / w.unit, left = 0;
  __m512 scale = _mm512_setzero_ps(), offset = _mm512_setzero_ps();
  char* out = tiles;
  for (int unit = 0; unit < w.num_units; ++unit) {
    if (left == 0) {
      scale = load_scales(scales, is_wide);
      scales += kStrip * w.scale_bytes;
      offset = _mm512_mul_ps(below, scale);
      if (w.has_minimum) {
        offset = _mm512_add_ps(offset, load_scales(minimums, is_wide));
        minimums += kStrip * w.scale_bytes;
      }
      left = units_per_group;
    }
    --left;
    for (int word = 0; word < words; ++word) {
      __m512i packed = _mm512_load_si512(codes);
      codes += kStrip * 4;
#pragma GCC unroll 4
      for (int pair = 0; pair < kColumns / 2; ++pair) {
        __m512 even, odd;
        if constexpr (kBits == 4) {
          // a lookup takes the lowest four bits alone
          even = _mm512_permutexvar_ps(_mm512_srli_epi32(packed, kBits * pair), values);
          odd = _mm512_permutexvar_ps(_mm512_srli_epi32(packed, 16 + kBits * pair), values);
        } else {
          even = raised(pair == 0 ? _mm512_slli_epi32(packed, 15) : _mm512_slli_epi32(packed, 7));
          odd = raised(pair == 0 ? _mm512_srli_epi32(packed, 1) : _mm512_srli_epi32(packed, 9));
        }
        even = _mm512_fmadd_ps(even, scale, offset);
        odd = _mm512_fmadd_ps(odd, scale, offset);
        _mm512_store_si512(out, as_pairs(even, odd));
        out += 64;
      }
    }
  }
  int64_t rest = (out - tiles) % kTileBytes;
  if (rest != 0) std::memset(out, 0, size_t(kTileBytes - rest));
}

// Of a block of up to 32 rows: the last columns, filled up with zeros to a whole tile.
struct Tail {
  alignas(64) bf16 values[2 * kTile * kDepth];

  void fill(const bf16* x, int64_t stride, int num_rows, int size) {
    std::memset(values, 0, sizeof values);
    for (int row = 0; row < num_rows; ++row) std::memcpy(values + row * kDepth, x + row * stride, size_t(size) * 2);
  }
};

// 32 rows by two strips. Rows or a strip that are not there are computed and left.
void multiply_block(const bf16* x, int64_t in_features, int num_rows, const Tail& tail, const char* left,
                    const char* right, float* sums) {
  int64_t whole = in_features / kDepth, stride = in_features * 2;
  const bf16* lower = num_rows > kTile ? x + kTile * in_features : x;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t step = 0; step < whole; ++step) {
    _tile_loadd(4, x + step * kDepth, stride);
    _tile_loadd(6, left + step * kTileBytes, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, right + step * kTileBytes, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, lower + step * kDepth, stride);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  if (in_features % kDepth != 0) {
    _tile_loadd(4, tail.values, 64);
    _tile_loadd(5, tail.values + kTile * kDepth, 64);
    _tile_loadd(6, left + whole * kTileBytes, 64);
    _tile_loadd(7, right + whole * kTileBytes, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, 128);
  _tile_stored(1, sums + 16, 128);
  _tile_stored(2, sums + 16 * 32, 128);
  _tile_stored(3, sums + 16 * 32 + 16, 128);
}

}  // namespace

void multiply_many_rows(const QuantizedMatrix& w, const bf16* x, bf16* out, int64_t num_rows) {
  int num_strips = int((w.out_features + kStrip - 1) / kStrip), threads = num_threads();
  int64_t strip_tiles = (w.in_features + kDepth - 1) / kDepth * kTileBytes;
  int most = int(kPanelBytes / strip_tiles) < 2 ? 2 : int(kPanelBytes / strip_tiles);
  int num_parts = threads * ((num_strips + most * threads - 1) / (most * threads));
  int strips_per_part = ((num_strips + num_parts - 1) / num_parts + 1) / 2 * 2;
  num_parts = (num_strips + strips_per_part - 1) / strips_per_part;
  // more threads than parts of the matrix share its parts by rows
  int64_t row_parts = num_parts < threads ? (threads + num_parts - 1) / num_parts : 1;
  int64_t rows_per_part = ((num_rows + row_parts - 1) / row_parts + 31) / 32 * 32;
  row_parts = (num_rows + rows_per_part - 1) / rows_per_part;
  parallel(int(num_parts * row_parts), [&](int task, int) {
    int first_strip = int(task / row_parts) * strips_per_part;
    int count = num_strips - first_strip < strips_per_part ? num_strips - first_strip : strips_per_part;
    int64_t first_row = task % row_parts * rows_per_part;
    int64_t end_row = first_row + rows_per_part < num_rows ? first_row + rows_per_part : num_rows;
    auto panel = static_cast<char*>(thread_scratch(size_t(count * strip_tiles)));
    for (int strip = 0; strip < count; ++strip) {
      const uint8_t* packed = w.strips + (first_strip + strip) * w.strip_bytes;
      w.bits == 4 ? widen_strip<4>(w, packed, panel + strip * strip_tiles)
                  : widen_strip<8>(w, packed, panel + strip * strip_tiles);
    }
    int configured = 0;
    for (int64_t row = first_row; row < end_row; row += 2 * kTile) {
      int taken = int(end_row - row < 2 * kTile ? end_row - row : 2 * kTile);
      if (taken != configured) {
        configure(TileConfig(taken < kTile ? taken : kTile, taken - kTile));
        configured = taken;
      }
      Tail tail;
      int64_t whole = w.in_features / kDepth * kDepth;
      if (whole < w.in_features)
        tail.fill(x + row * w.in_features + whole, w.in_features, taken, int(w.in_features - whole));
      for (int strip = 0; strip < count; strip += 2) {
        alignas(64) float sums[32 * 32];
        const char* left = panel + strip * strip_tiles;
        bool has_right = strip + 1 < count;
        multiply_block(x + row * w.in_features, w.in_features, taken, tail, left, has_right ? left + strip_tiles : left, sums);
        write_strip(w, first_strip + strip, sums, 32, out + row * w.out_features, taken);
        if (has_right) write_strip(w, first_strip + strip + 1, sums + 16, 32, out + row * w.out_features, taken);
      }
    }
    _tile_release();
  });
}

}  // namespace inferplane::INFERPLANE_LEVEL

#endif
