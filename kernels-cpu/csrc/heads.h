// Between the projection to q, k and v and attention: norms of heads, rotary embedding, and the KV cache's new tokens.
#pragma once

#include <type_traits>

#include "kv_tiles.h"

namespace inferplane::INFERPLANE_LEVEL {

struct Rotation {
  const int64_t* positions;  // [num_tokens]
  const float* cos_sin;      // [max_positions, rotary_dim], cosines first
  const void *q_norm, *k_norm;  // [head_dim] in the dtype of the heads, or both null
  int32_t rotary_dim;
  float eps;
};

// Norm and rotation of one head, from `head` into `turned`, which may be the same.
template <class T>
inline void turn_head(const T* head, T* turned, int head_dim, const T* norm, float eps, const float* table,
                      int rotary_dim) {
  int half_dim = rotary_dim / 2;
  const float *cos = table, *sin = table + half_dim;
  if (norm == nullptr && half_dim % 16 == 0) {  // nothing has to be kept
    for (int at = 0; at < half_dim; at += 16) {
      Vec first = load(head + at), second = load(head + half_dim + at), c = load(cos + at), s = load(sin + at);
      store(turned + at, fma(first, c, all_of(0) - second * s));
      store(turned + half_dim + at, fma(second, c, first * s));
    }
    if (turned != head) std::memcpy(turned + rotary_dim, head + rotary_dim, (head_dim - rotary_dim) * sizeof(T));
    return;
  }
  float x[kMostHeadDim];
  Vec squares = all_of(0);
  for (int at = 0; at < head_dim; at += 16) {
    int n = head_dim - at < 16 ? head_dim - at : 16;
    Vec part = n == 16 ? load(head + at) : load(head + at, n);
    if (norm != nullptr) squares = fma(part, part, squares);
    n == 16 ? store(x + at, part) : store(x + at, part, n);
  }
  if (norm != nullptr) {
    Vec inverse = all_of(1 / __builtin_sqrtf(sum_of(squares) / float(head_dim) + eps));
    for (int at = 0; at < head_dim; at += 16) {
      int n = head_dim - at < 16 ? head_dim - at : 16;
      store(x + at, load(x + at, n) * inverse * load(norm + at, n), n);
    }
  }
  for (int at = 0; at < half_dim; at += 16) {
    if (half_dim - at >= 16) {
      Vec first = load(x + at), second = load(x + half_dim + at), c = load(cos + at), s = load(sin + at);
      store(turned + at, fma(first, c, all_of(0) - second * s));
      store(turned + half_dim + at, fma(second, c, first * s));
    } else {
      int n = half_dim - at;
      Vec first = load(x + at, n), second = load(x + half_dim + at, n), c = load(cos + at, n), s = load(sin + at, n);
      store(turned + at, fma(first, c, all_of(0) - second * s), n);
      store(turned + half_dim + at, fma(second, c, first * s), n);
    }
  }
  for (int at = rotary_dim; at < head_dim; at += 16) {
    int n = head_dim - at < 16 ? head_dim - at : 16;
    store(turned + at, load(x + at, n), n);
  }
}

// Keys and values that a step brings: rows of `stride` elements for each token, heads of one token together.
template <class T>
struct NewTokens {
  const T *k, *v;
  int64_t stride;
  int num_tokens;
};

// Norm and rotation of one head of a token, as `turn_head`; `norm` is the one of q or of k.
template <class T>
inline void turn_head_of(const Rotation& rotation, int64_t token, const T* head, T* turned, int head_dim,
                         const void* norm) {
  const float* table = rotation.cos_sin + rotation.positions[token] * rotation.rotary_dim;
  turn_head(head, turned, head_dim, static_cast<const T*>(norm), rotation.eps, table, rotation.rotary_dim);
}

// Numbers in the type that they are stored in: where they lie or, of another type, in `room`.
template <class T, class X>
inline const T* stored_as(const X* from, int size, [[maybe_unused]] T* room) {
  if constexpr (std::is_same_v<T, X>) {
    return from;
  } else {
    for (int at = 0; at < size; at += 16) {
      int n = size - at;
      n >= 16 ? store(room + at, load(from + at)) : store(room + at, load(from + at, n), n);
    }
    return room;
  }
}

// Stores k, turned if there is a rotation, and v.
template <class X, class T>
void place_tokens(const NewTokens<X>& tokens, const KV<T>& kv, const int64_t* slots, const Rotation* rotation) {
  int head_dim = kv.head_dim;
  auto stored_key = [&](int64_t token, int head, T* room) -> const T* {
    const X* key = tokens.k + token * tokens.stride + head * head_dim;
    if (rotation == nullptr) return stored_as(key, head_dim, room);
    if constexpr (std::is_same_v<T, X>) {
      turn_head_of(*rotation, token, key, room, head_dim, rotation->k_norm);
    } else {
      X turned[kMostHeadDim];
      turn_head_of(*rotation, token, key, turned, head_dim, rotation->k_norm);
      stored_as(turned, head_dim, room);
    }
    return room;
  };
  auto place = [&](int64_t first, int num) {
    T room[2 * kPanelTokens * kMostHeadDim];
    for (int head = 0; head < kv.num_kv_heads; ++head) {
      const T *keys[kPanelTokens], *values[kPanelTokens];
      for (int i = 0; i < num; ++i) {
        const X* value = tokens.v + (first + i) * tokens.stride + head * head_dim;
        keys[i] = stored_key(first + i, head, room + 2 * i * head_dim);
        values[i] = stored_as(value, head_dim, room + (2 * i + 1) * head_dim);
      }
      if (num == 1)
        kv.store(slots[first], head, keys[0], values[0]);
      else
        kv.store_panel(slots[first], head, keys, values);
    }
  };
  auto fills_panel = [&](int64_t first, int64_t end) {
    if (!kv.stores_panels() || end - first < kPanelTokens || slots[first] % kPanelTokens != 0) return false;
    for (int i = 1; i < kPanelTokens; ++i)
      if (slots[first + i] != slots[first] + i) return false;
    return true;
  };
  auto fetch = [&](int64_t token) {
    for (int head = 0; head < kv.num_kv_heads; ++head) kv.prefetch_slot(slots[token], head);
  };
  auto place_range = [&](int64_t first, int64_t end) {
    for (int num; first < end; first += num) {
      num = fills_panel(first, end) ? kPanelTokens : 1;
      if (num == 1 && first + 1 < end) fetch(first + 1);
      place(first, num);
    }
  };
  int num_tokens = tokens.num_tokens, per_task = num_tokens < 512 ? kPanelTokens : 4 * kPanelTokens;
  if (num_tokens <= kPanelTokens) return place_range(0, num_tokens);
  parallel((num_tokens + per_task - 1) / per_task, [&](int task, int) {
    int first = task * per_task, end = first + per_task;
    place_range(first, end < num_tokens ? end : num_tokens);
  });
}

}  // namespace inferplane::INFERPLANE_LEVEL
