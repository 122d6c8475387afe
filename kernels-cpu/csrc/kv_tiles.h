// How keys and values lie in the KV cache: as the right-hand matrices of the two products of attention.
//
// A block of one KV head is a row of tiles of 32 tokens. A tile holds keys, then values, each as panels of 16 columns:
//   keys:   2 panels of 16 tokens,           each [head_dim / P][16 tokens][P]
//   values: head_dim / 16 panels of 16 dims, each [32 / P][16 dims][P]
// where P neighbours in the depth of the product, 2 of bfloat16 and 1 of other types, lie together: what the dot product
// of bfloat16 pairs and AMX read. Blocks lie as [num_blocks][num_kv_heads].
//
// Where blocks are no multiple of 32 tokens, or heads none of 16, they hold plain rows instead, all keys before all values,
// and tiles are made of them when they are read. So do blocks of latents, which are keys and values at once: a row is kept
// once, and both tiles are made of it. And so do blocks of codes (codes.h), whose rows of int8 have their scales, float32,
// behind all rows of the block.
#pragma once

#include "codes.h"
#include "transpose.h"

namespace inferplane::INFERPLANE_LEVEL {

constexpr int kTile = 32;  // tokens
constexpr int kPanelTokens = 16;
constexpr int kMostHeadDim = 1024;

template <class T>
constexpr int kPair = 1;
template <>
inline constexpr int kPair<bf16> = 2;

inline int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

struct Tile {
  const void *keys, *values;
};

template <class T>
struct KV {
  T* memory;
  int num_kv_heads, block_size, head_dim;
  bool is_latent;
  Code code;
  const float *k_scales, *v_scales;  // [num_kv_heads] of 8-bit floats

  bool is_tiled() const {
    return !is_latent && code == Code::kNone && block_size % kTile == 0 && head_dim % 16 == 0;
  }
  int num_halves() const { return is_latent ? 1 : 2; }
  // Elements of keys, or of values, in one tile that is padded to whole panels.
  int tile_size() const { return kTile * round_up(head_dim, 16); }

  T* block(int64_t id, int head) const {
    return memory + (id * num_kv_heads + head) * num_halves() * block_size * head_dim;
  }

  // Writes one token's key and value, of a latent the key alone: key is contiguous.
  void store(int64_t slot, int head, const T* key, const T* value) const {
    if (code != Code::kNone) {
      store_codes(slot, head, 0, key);
      if (!is_latent) store_codes(slot, head, 1, value);
      return;
    }
    int offset = int(slot % block_size);
    T* at = block(slot / block_size, head);
    if (!is_tiled()) {
      std::memcpy(at + offset * head_dim, key, head_dim * sizeof(T));
      if (!is_latent) std::memcpy(at + (block_size + offset) * head_dim, value, head_dim * sizeof(T));
      return;
    }
    T* keys = at + offset / kTile * 2 * tile_size();
    put_key(keys, head_dim, offset % kTile, key);
    put_value(keys + tile_size(), offset % kTile, value, head_dim);
  }

  // Whether `store_panel` can be used.
  bool stores_panels() const { return has_panels() && is_tiled(); }

  // `store` for a panel of 16 tokens, whose slots begin with a multiple of 16 and follow one another.
  void store_panel(int64_t slot, int head, const T* const* keys, const T* const* values) const {
    int offset = int(slot % block_size);
    T* to_keys = block(slot / block_size, head) + offset / kTile * 2 * tile_size();
    put_panel(to_keys, to_keys + tile_size(), offset % kTile, keys, values);
  }

  // The tile of tokens first to first + 32 of a request with these blocks, first a multiple of 32. Blocks with no token
  // from first_seen to end may be gone, and slots that are not written yet hold anything: values from there are 0 in what
  // this returns, because a weight of 0 times NaN is NaN. `scratch` has room for two tile_size().
  Tile tile(const int32_t* blocks, int head, int first, int first_seen, int end, T* scratch) const {
    int size = tile_size();
    if (!is_tiled()) return gather(blocks, head, first, first_seen, end, scratch);
    const T* keys = block(blocks[first / block_size], head) + first % block_size / kTile * 2 * size;
    const T* values = keys + size;
    if (first + kTile > end) values = copy_values(values, end - first, scratch);
    return {keys, values};
  }

  // Fetches what `tile` of token `first` will return: four stretches side by side, since the processor itself reads ahead
  // within each page that it sees read. Of codes it is a guess: rows of the first block that the tile is in.
  void prefetch(const int32_t* blocks, int head, int first) const {
    if (code != Code::kNone)
      for (int half = 0; half < num_halves(); ++half) {
        auto rows = reinterpret_cast<const char*>(codes(blocks[first / block_size], head, half, first % block_size));
        for (int at = 0; at < kTile * head_dim; at += 64) _mm_prefetch(rows + at, _MM_HINT_T0);
      }
    if (!is_tiled()) return;
    auto lines = reinterpret_cast<const char*>(block(blocks[first / block_size], head) +
                                               first % block_size / kTile * 2 * tile_size());
    size_t stretch = 2 * tile_size() * sizeof(T) / 4;
    for (size_t at = 0; at < stretch; at += 64)
      for (int i = 0; i < 4; ++i) _mm_prefetch(lines + i * stretch + at, _MM_HINT_T0);
  }

  // Fetches what `store` will write.
  void prefetch_slot(int64_t slot, int head) const {
    if (!is_tiled()) return;
    int offset = int(slot % block_size), token = offset % kTile;
    const T* keys = block(slot / block_size, head) + offset / kTile * 2 * tile_size();
    const T* values = keys + tile_size();
    for (int dim = 0; dim < head_dim; dim += kPair<T>)
      __builtin_prefetch(keys + (token / 16 * head_dim + dim) * 16 + token % 16 * kPair<T>, 1);
    for (int dim = 0; dim < head_dim; dim += 16)
      __builtin_prefetch(values + dim * kTile + token / kPair<T> * 16 * kPair<T>, 1);
  }

 private:
  bool has_panels() const { return INFERPLANE_HAS_AVX512 && kPair<T> == 2 && head_dim % 32 == 0; }

  // Writes 16 tokens from `token` on, a multiple of 16, into a tile. Only with `has_panels`.
  void put_panel([[maybe_unused]] T* to_keys, [[maybe_unused]] T* to_values, [[maybe_unused]] int token,
                 [[maybe_unused]] const T* const* keys, [[maybe_unused]] const T* const* values) const {
#if INFERPLANE_HAS_AVX512
    to_keys += token * head_dim;
    for (int dim = 0; dim < head_dim; dim += 32) {  // pairs are turned round as numbers of four bytes
      const float* rows[16];
      for (int row = 0; row < 16; ++row) rows[row] = reinterpret_cast<const float*>(keys[row] + dim);
      transpose_16x16(rows, reinterpret_cast<float*>(to_keys + dim * 16), 16);
    }
    for (int dim = 0; dim < head_dim; dim += 16)
      for (int row = 0; row < 16; row += 2) {
        auto wide = [&](const T* from) {
          return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + dim)));
        };
        __m512i pairs = _mm512_or_si512(wide(values[row]), _mm512_slli_epi32(wide(values[row + 1]), 16));
        _mm512_storeu_si512(to_values + dim * kTile + (token + row) * 16, pairs);
      }
#endif
  }

  // Writes a key as column `token` of a tile of heads of `depth`.
  void put_key(T* keys, int depth, int token, const T* key) const {
    constexpr int kP = kPair<T>;
    T* column = keys + token / 16 * 16 * depth + token % 16 * kP;
    for (int at = 0; at < head_dim; at += kP)
      std::memcpy(column + at * 16, key + at, (kP == 1 || at + 1 < head_dim ? kP : 1) * sizeof(T));
  }

  // Writes a value as row `token` of a tile.
  static void put_value(T* values, int token, const T* value, int num_dims) {
    constexpr int kP = kPair<T>;
    for (int dim = 0; dim < num_dims; dim += 16) {
      T* row = values + dim * kTile + token / kP * 16 * kP + token % kP;
      int num = num_dims - dim < 16 ? num_dims - dim : 16;
      if constexpr (kP == 1) {
        std::memcpy(row, value + dim, num * sizeof(T));
      } else {
#if INFERPLANE_HAS_AVX512
        __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first_lanes(num), value + dim));
        // a row starts at an even element, an odd token one further
        _mm512_mask_storeu_epi16(row - token % 2, token % 2 ? 0xaaaaaaaau : 0x55555555u,
                                 token % 2 ? _mm512_slli_epi32(wide, 16) : wide);
#else
        for (int i = 0; i < num; ++i) row[i * kP] = value[dim + i];
#endif
      }
    }
  }

  const T* copy_values(const T* values, int num_tokens, T* copy) const {
    constexpr int kP = kPair<T>;
    int kept = num_tokens / kP * 16 * kP;  // elements of a panel's whole rows
    for (int dim = 0; dim < head_dim; dim += 16) {
      const T* from = values + dim * kTile;
      T* to = copy + dim * kTile;
      std::memcpy(to, from, kept * sizeof(T));
      std::memset(static_cast<void*>(to + kept), 0, (16 * kTile - kept) * sizeof(T));
      if (num_tokens % kP)
        for (int i = 0; i < 16; ++i) to[kept + i * kP] = from[kept + i * kP];
    }
    return copy;
  }

  // Codes of a key (half 0) or value.
  uint8_t* codes(int64_t id, int head, int half, int offset) const {
    return code_block(id, head) + (half * block_size + offset) * head_dim;
  }
  uint8_t* code_block(int64_t id, int head) const {
    int64_t row_bytes = head_dim + (code == Code::kInt8 ? sizeof(float) : 0);
    return reinterpret_cast<uint8_t*>(memory) + (id * num_kv_heads + head) * num_halves() * block_size * row_bytes;
  }
  uint8_t* row_scale(int64_t id, int head, int half, int offset) const {
    return code_block(id, head) + num_halves() * block_size * head_dim + (half * block_size + offset) * sizeof(float);
  }
  float head_scale(int head, int half) const {
    const float* scales = half == 0 ? k_scales : v_scales;
    return scales == nullptr ? 1 : scales[head];
  }

  void store_codes(int64_t slot, int head, int half, const T* row) const {
    int64_t id = slot / block_size;
    int offset = int(slot % block_size);
    uint8_t* to = codes(id, head, half, offset);
    if (code == Code::kInt8) {
      float scale = encode_int8(row, head_dim, to);
      std::memcpy(row_scale(id, head, half, offset), &scale, sizeof(scale));
    } else {
      encode_float8(code, row, head_scale(head, half), head_dim, to);
    }
  }

  void load_codes(int64_t id, int head, int half, int offset, T* row) const {
    float scale = head_scale(head, half);
    if (code == Code::kInt8) std::memcpy(&scale, row_scale(id, head, half, offset), sizeof(scale));
    decode(code, codes(id, head, half, offset), scale, head_dim, row);
  }

  Tile gather(const int32_t* blocks, int head, int first, int first_seen, int end, T* scratch) const {
    int begin = first_seen > first ? first_seen - first : 0, num_tokens = end - first < kTile ? end - first : kTile;
    if (begin > 0 || num_tokens < kTile || !has_panels())
      std::memset(static_cast<void*>(scratch), 0, 2 * tile_size() * sizeof(T));
    code == Code::kNone ? gather_rows(blocks, head, first, begin, num_tokens, scratch)
                        : gather_codes(blocks, head, first, begin, num_tokens, scratch);
    return {scratch, scratch + tile_size()};
  }

  void gather_rows(const int32_t* blocks, int head, int first, int begin, int end, T* scratch) const {
    const T *keys[kTile], *values[kTile];
    for (int token = begin; token < end; ++token) {
      int position = first + token;
      keys[token] = block(blocks[position / block_size], head) + position % block_size * head_dim;
      values[token] = is_latent ? keys[token] : keys[token] + block_size * head_dim;
    }
    put_rows(scratch, begin, end, keys, values);
  }

  void gather_codes(const int32_t* blocks, int head, int first, int begin, int end, T* scratch) const {
    T room[2][kPanelTokens][kMostHeadDim];
    const T *keys[kTile], *values[kTile];
    for (int panel = begin / kPanelTokens * kPanelTokens; panel < end; panel += kPanelTokens) {
      int from = panel < begin ? begin : panel, to = panel + kPanelTokens < end ? panel + kPanelTokens : end;
      for (int token = from; token < to; ++token) {
        int64_t id = blocks[(first + token) / block_size];
        int offset = (first + token) % block_size;
        for (int half = 0; half < num_halves(); ++half)
          load_codes(id, head, half, offset, room[half][token - panel]);
        keys[token] = room[0][token - panel];
        values[token] = room[num_halves() - 1][token - panel];
      }
      put_rows(scratch, from, to, keys, values);
    }
  }

  // Writes the rows of tokens begin to end into the tiles in `scratch`.
  void put_rows(T* scratch, int begin, int end, const T* const* from_keys, const T* const* from_values) const {
    T *keys = scratch, *values = scratch + tile_size();
    int depth = round_up(head_dim, 16);
    for (int token = begin; token < end;) {
      if (has_panels() && token % 16 == 0 && token + 16 <= end) {
        put_panel(keys, values, token, from_keys + token, from_values + token);
        token += 16;
        continue;
      }
      put_key(keys, depth, token, from_keys[token]);
      put_value(values, token, from_values[token], head_dim);
      ++token;
    }
  }
};

}  // namespace inferplane::INFERPLANE_LEVEL
