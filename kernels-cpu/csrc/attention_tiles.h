// Attention of many rows with AMX: scores and sums of values are products of tiles, and while the tiles multiply for one
// chunk of the keys, the vector units turn the scores of another into weights.
//
// The weights of a row are powers of 2 below the highest score of its first chunk, not of all: like floats they may be as
// large as 2 ** 64, so that nothing has to be scaled when a higher score comes. Where that is not enough, or a number is
// infinite or none, `run` says so, and attention_weights.h has the way that takes everything.
#pragma once

#include "attention_weights.h"

namespace inferplane::INFERPLANE_LEVEL {

template <class T>
constexpr bool kAttendsByTiles = INFERPLANE_HAS_AMX && kPair<T> == 2;

constexpr int kTileRows = 32;                      // of queries: two tiles
constexpr int kTilesAtOnce = 2;                    // of keys
constexpr int kKeysAtOnce = kTilesAtOnce * kTile;  // their scores, twice, stay in the first-level cache
constexpr int kWeightStride = 4 * kKeysAtOnce;

// Memory of TileAttention.
struct TileRoom {
  float* scores;   // [2][kTileRows][kKeysAtOnce]
  bf16* weights;   // [kTileRows][kWeightStride]
  float* weighed;  // [kTileRows][16]: lanes of the sums of weights
};

#if INFERPLANE_HAS_AMX

// Powers of 2 for what will be bfloat16, 32 at a time as numbers of 16 bits: an exponent with 8 bits behind the point is
// nearly the number that it is the logarithm of, its bits taken as a float's. What is missing comes from a table for the 64
// values of the first 6 of the bits. The error is 0.28 % on average where rounding alone makes 0.23 %, but 32 take
// half as many instructions as 16 powers each of floats.
class Powers {
 public:
  static constexpr float kUnit = 1 << 8, kOne = 127 << 8;  // 1 as an exponent, and the exponent of 1

  // Of exponents * kUnit + kOne. What is too low is 0, and so is NaN; what is too high has the bits of infinity or NaN, up
  // to an exponent of 8 million, behind which it is 0.
  __m512i of(Vec first, Vec second) const {
    __m512i packed = _mm512_packus_epi32(_mm512_cvtps_epi32(first.all), _mm512_cvtps_epi32(second.all));
    __m512i exponents = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), packed);
    __m512i excess = _mm512_maskz_permutexvar_epi8(kLowBytes, _mm512_srli_epi16(exponents, 2), table_);
    return _mm512_avg_epu16(_mm512_sub_epi16(exponents, excess), _mm512_setzero_si512());
  }

 private:
  static constexpr __mmask64 kLowBytes = 0x5555555555555555;
  // 256 * (1 + x - 2 ** x) for x = (i + 0.5) / 64, but 0 for i = 0: whole powers, and what is 0, are exact.
  alignas(64) static constexpr uint8_t kExcess[64] = {
      0,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 14, 15, 16, 17, 17, 18, 18, 19,
      19, 20, 20, 21, 21, 21, 21, 22, 22, 22, 22, 22, 22, 22, 22, 22, 22, 21, 21, 21, 20, 20,
      19, 19, 18, 18, 17, 16, 16, 15, 14, 13, 12, 11, 10, 9,  8,  6,  5,  4,  2,  1};
  __m512i table_ = _mm512_load_si512(kExcess);
};

constexpr float kHighestWeight = 18446744073709551616.f;  // 2 ** 64

// Rows of one request, at most kTileRows, and the keys that they see. head_dim is a multiple of 32, blocks are tiled.
//
// Keys are taken in chunks, values in pairs of chunks. While the weights of a chunk are computed, tiles multiply the keys
// of the next one, and half of the values of the pair before: some rows of weights behind each product of tiles.
class TileAttention {
 public:
  // The request's tokens before row 0, rows of each token, the rows, and their keys; the first is a multiple of kTile.
  struct Shape {
    int past, group, first_row, num_rows, first_key, end_key, first_seen;
  };

  TileAttention(const LayerShape& layer, const KV<bf16>& kv, const int32_t* blocks, int head, const Shape& shape,
                const bf16* queries, const TileRoom& room, bf16* scratch, const Softmax& softmax)
      : kv_(kv),
        blocks_(blocks),
        head_(head),
        shape_(shape),
        queries_(queries),
        room_(room),
        scratch_(scratch),
        softmax_(softmax),
        head_dim_(layer.head_dim),
        factor_(layer.scale * kLog2E),
        num_tiles_((shape.end_key - shape.first_key + kTile - 1) / kTile) {
    for (int row = 0; row < kTileRows; ++row) {
      int position = shape.past + (shape.first_row + (row < shape.num_rows ? row : shape.num_rows - 1)) / shape.group;
      low_[row] = layer.first_visible(position);
      high_[row] = position + 1;
    }
  }

  static bool can(const LayerShape& layer, const KV<bf16>& kv) {
    return kv.is_tiled() && layer.head_dim % 32 == 0 && layer.soft_cap == 0;
  }

  // Returns false where the result is not to be used.
  bool run() {
    // a row's first chunk has to have a key that it sees
    if (low_[kTileRows - 1] >= shape_.first_key + kKeysAtOnce) return false;
    auto nothing = [] {};
    find_tiles(0);
    for (int tile = 0; tile < tiles_of(0); ++tile) score_keys(tile, nothing);
    if (!begin()) return false;
    int num_chunks = (num_tiles_ + kTilesAtOnce - 1) / kTilesAtOnce, last_pair = (num_chunks - 1) / 2;
    Vec suspicion = all_of(0);
    for (int chunk = 0; chunk < num_chunks; ++chunk) {
      find_tiles(chunk + 1);
      suspicion += not_finite(chunk);
      int next = (chunk + 1) * kTilesAtOnce, pair = chunk / 2 - 1, first_dim = chunk % 2 * 32;
      int num_products = tiles_of(chunk + 1) * head_dim_ / 32;
      if (pair >= 0) num_products += 2 * kTilesAtOnce * ((head_dim_ - first_dim + 32) / 64);
      int product = 0, row = 0;
      auto weigh_some = [&] {
        int end = ++product < num_products ? kTileRows * product / num_products : kTileRows;
        weigh(chunk, row, end);
        row = end;
      };
      for (int tile = 0; tile < tiles_of(chunk + 1); ++tile) score_keys(next + tile, weigh_some);
      if (pair >= 0)
        for (int dim = first_dim; dim < head_dim_; dim += 64) add_values(pair, dim, weigh_some);
      if (num_products == 0) weigh_some();
    }
    if (num_chunks % 2 == 1 && last_pair > 0)  // the other half of the pair before
      for (int dim = 32; dim < head_dim_; dim += 64) add_values(last_pair - 1, dim, nothing);
    for (int dim = 0; dim < head_dim_; dim += 32) add_values(last_pair, dim, nothing);
    return sum_of(suspicion) == 0 && finish();
  }

 private:
  static constexpr int kRing = 8 * kTilesAtOnce;  // tiles that are remembered: two pairs, and a chunk

  int first_key(int chunk) const { return shape_.first_key + chunk * kKeysAtOnce; }
  int tiles_of(int chunk) const {
    int left = num_tiles_ - chunk * kTilesAtOnce;
    return left < 0 ? 0 : left < kTilesAtOnce ? left : kTilesAtOnce;
  }

  void find_tiles(int chunk) {
    int first = chunk * kTilesAtOnce;
    for (int index = first; index < first + tiles_of(chunk); ++index) {
      int key = shape_.first_key + index * kTile;
      Tile tile = kv_.tile(blocks_, head_, key, shape_.first_seen, shape_.end_key, scratch_);
      keys_[index % kRing] = static_cast<const bf16*>(tile.keys);
      values_[index % kRing] = static_cast<const bf16*>(tile.values);
    }
  }

  float* scores_of(int chunk) const { return room_.scores + chunk % 2 * kTileRows * kKeysAtOnce; }
  // [kTileRows][kWeightStride]
  bf16* weights_of(int chunk) const { return room_.weights + chunk % 4 * kKeysAtOnce; }

  // Tiles 0 to 3 are sums, 4 and 5 rows of the left, 6 and 7 columns of the right.
  static void multiply_tiles(const bf16* rows, int stride, const bf16* first, const bf16* second) {
    asm volatile("" ::: "memory");  // the compiler is not told what the instructions read, or write
    _tile_loadd(4, rows, stride * 2);
    _tile_stream_loadd(6, first, 64);  // the hint keeps what is read again in the first-level cache
    _tile_dpbf16ps(0, 4, 6);
    _tile_stream_loadd(7, second, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, rows + 16 * stride, stride * 2);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }

  static void clear_tiles() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }

  static void load_tiles(const float* from, int stride) {
    _tile_loadd(0, from, stride * 4);
    _tile_loadd(1, from + 16, stride * 4);
    _tile_loadd(2, from + 16 * stride, stride * 4);
    _tile_loadd(3, from + 16 * stride + 16, stride * 4);
  }

  static void store_tiles(float* to, int stride) {
    _tile_stored(0, to, stride * 4);
    _tile_stored(1, to + 16, stride * 4);
    _tile_stored(2, to + 16 * stride, stride * 4);
    _tile_stored(3, to + 16 * stride + 16, stride * 4);
    asm volatile("" ::: "memory");
  }

  // Scores of a tile's keys. Behind each product `meanwhile` is called.
  template <class Fn>
  void score_keys(int tile, const Fn& meanwhile) const {
    const bf16* keys = keys_[tile % kRing];
    clear_tiles();
    for (int dim = 0; dim < head_dim_; dim += 32) {
      multiply_tiles(queries_ + dim, head_dim_, keys + dim * 16, keys + (head_dim_ + dim) * 16);
      meanwhile();
    }
    store_tiles(scores_of(tile / kTilesAtOnce) + tile % kTilesAtOnce * kTile, kKeysAtOnce);
  }

  // Adds 32 dims of a pair's values, times their weights.
  template <class Fn>
  void add_values(int pair, int dim, const Fn& meanwhile) const {
    float* sums = softmax_.sums + dim;
    pair == 0 ? clear_tiles() : load_tiles(sums, head_dim_);
    const bf16* weights = weights_of(2 * pair);
    int first = pair * 2 * kTilesAtOnce, end = first + 2 * kTilesAtOnce;
    for (int tile = first; tile < end && tile < num_tiles_; ++tile, weights += kTile) {
      const bf16* values = values_[tile % kRing] + dim * kTile;
      multiply_tiles(weights, kWeightStride, values, values + 16 * kTile);
      meanwhile();
    }
    store_tiles(sums, head_dim_);
  }

  // Of 32 keys from `first` on, those that a row sees.
  __mmask32 seen_by(int row, int first) const { return lanes(low_[row] - first, high_[row] - first); }
  static __mmask32 lanes(int low, int high) {
    auto below = [](int n) { return n <= 0 ? 0u : n >= 32 ? ~0u : (1u << n) - 1; };
    return below(high) & ~below(low);
  }

  // Sets what exponents are counted from.
  bool begin() {
    const float* scores = scores_of(0);
    bool is_finite = true;
    for (int first = 0; first < kTileRows; first += 16) {
      Vec rows[16];
      for (int i = 0; i < 16; ++i) {
        int row = first + i;
        Vec highest = all_of(-__builtin_inff());
        for (int at = 0; at < tiles_of(0) * kTile; at += 16) {
          auto seen = __mmask16(seen_by(row, first_key(0) + at));
          highest.all = _mm512_mask_max_ps(highest.all, seen, highest.all, load(scores + row * kKeysAtOnce + at).all);
        }
        rows[i] = row < shape_.num_rows ? highest : all_of(0);
      }
      Vec highest = max_of_each(rows) * all_of(factor_);
      is_finite = is_finite && all_up_to(highest, __FLT_MAX__) && all_up_to(all_of(0) - highest, __FLT_MAX__);
      store(softmax_.highest + first, highest);
      store(zeros_ + first, all_of(Powers::kOne) - highest * all_of(Powers::kUnit));
    }
    for (int row = 0; row < kTileRows; ++row) store(room_.weighed + row * 16, all_of(0));
    return is_finite;
  }

  // 0 in all lanes if the keys that any row sees are finite; what one row's scores with them show.
  Vec not_finite(int chunk) const {
    Vec sum = all_of(0);
    for (int at = 0; at < tiles_of(chunk) * kTile; at += 16) {
      int first = first_key(chunk) + at;
      __mmask16 seen = __mmask16(lanes(shape_.first_seen - first, shape_.end_key - first));
      __m512 score = _mm512_maskz_loadu_ps(seen, scores_of(chunk) + at);
      sum += Vec{_mm512_sub_ps(score, score)};
    }
    return sum;
  }

  // Turns rows of scores into weights.
  void weigh(int chunk, int first_row, int end_row) const {
    bool is_whole = low_[kTileRows - 1] <= first_key(chunk) && high_[0] >= first_key(chunk + 1);
    is_whole ? weigh_rows<true>(chunk, first_row, end_row) : weigh_rows<false>(chunk, first_row, end_row);
  }

  template <bool kIsWhole>
  void weigh_rows(int chunk, int first_row, int end_row) const {
    const Powers powers;
    const Vec factor = all_of(factor_ * powers.kUnit);
    const auto ones = (__m512bh)_mm512_set1_epi16(0x3f80);
    const float* scores = scores_of(chunk);
    bf16* weights = weights_of(chunk);
    int num_tiles = kIsWhole ? kTilesAtOnce : tiles_of(chunk);
    for (int row = first_row; row < end_row; ++row) {
      Vec zero = all_of(zeros_[row]), sum = load(room_.weighed + row * 16);
      for (int tile = 0; tile < num_tiles; ++tile) {
        const float* from = scores + row * kKeysAtOnce + tile * kTile;
        __m512i raised = powers.of(fma(load(from), factor, zero), fma(load(from + 16), factor, zero));
        if (!kIsWhole) raised = _mm512_maskz_mov_epi16(seen_by(row, first_key(chunk) + tile * kTile), raised);
        sum.all = _mm512_dpbf16_ps(sum.all, (__m512bh)raised, ones);
        _mm512_store_si512(weights + row * kWeightStride + tile * kTile, raised);
      }
      store(room_.weighed + row * 16, sum);
    }
  }

  bool finish() const {
    bool is_finite = true;
    for (int first = 0; first < shape_.num_rows; first += 16) {
      Vec rows[16];
      for (int i = 0; i < 16; ++i) rows[i] = load(room_.weighed + (first + i) * 16);
      Vec sums = sum_of_each(rows);
      store(softmax_.weights + first, sums);
      is_finite = is_finite && all_up_to(kept_lanes(sums, 0, shape_.num_rows - first, 0), kHighestWeight);
    }
    return is_finite;
  }

  const KV<bf16>& kv_;
  const int32_t* blocks_;
  int head_;
  Shape shape_;
  const bf16* queries_;  // [kTileRows, head_dim]
  TileRoom room_;
  bf16* scratch_;
  Softmax softmax_;
  int head_dim_;
  float factor_;
  int num_tiles_;
  const bf16 *keys_[kRing], *values_[kRing];
  int low_[kTileRows], high_[kTileRows];  // keys that rows see
  float zeros_[kTileRows];                // what scores are counted from, as `Powers` takes it
};

#endif

}  // namespace inferplane::INFERPLANE_LEVEL
