// Between the projection to q, k and v and attention: norms of heads, rotary embedding, and the KV cache's new tokens.
#pragma once

#include <type_traits>

#include "kv_tiles.h"

namespace inferplane::INFERPLANE_LEVEL {

constexpr int kMostHeadDim = 1024;

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
  int half_dim = rotary_dim / 2;
  const float *cos = table, *sin = table + half_dim;
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

// What a step brings: rows of `stride` elements for each token, heads of one token together.
template <class T>
struct NewTokens {
  T *q, *k, *v;
  int64_t q_stride, kv_stride;
  int num_tokens, num_heads;
};

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

// Turns q where it lies, if there is a rotation, and stores k, turned, and v.
template <class X, class T>
void place_tokens(const NewTokens<X>& tokens, const KV<T>& kv, const int64_t* slots, const Rotation* rotation) {
  constexpr int kTokensPerTask = 16;
  int head_dim = kv.head_dim, num_kv_heads = kv.num_kv_heads;
  auto place = [&](int64_t token) {
    const float* table = nullptr;
    if (rotation != nullptr) {
      table = rotation->cos_sin + rotation->positions[token] * rotation->rotary_dim;
      X* q = tokens.q + token * tokens.q_stride;
      for (int head = 0; head < tokens.num_heads; ++head)
        turn_head(q + head * head_dim, q + head * head_dim, head_dim, static_cast<const X*>(rotation->q_norm),
                  rotation->eps, table, rotation->rotary_dim);
    }
    for (int head = 0; head < num_kv_heads; ++head) {
      const X* key = tokens.k + token * tokens.kv_stride + head * head_dim;
      const X* value = tokens.v + token * tokens.kv_stride + head * head_dim;
      X turned[kMostHeadDim];
      T stored_key[kMostHeadDim], stored_value[kMostHeadDim];
      if (rotation != nullptr) {
        turn_head(key, turned, head_dim, static_cast<const X*>(rotation->k_norm), rotation->eps, table,
                  rotation->rotary_dim);
        key = turned;
      }
      kv.store(slots[token], head, stored_as(key, head_dim, stored_key), stored_as(value, head_dim, stored_value));
    }
  };
  int num_tokens = tokens.num_tokens;
  if (num_tokens <= kTokensPerTask) {
    for (int token = 0; token < num_tokens; ++token) place(token);
    return;
  }
  parallel((num_tokens + kTokensPerTask - 1) / kTokensPerTask, [&](int task, int) {
    for (int token = task * kTokensPerTask; token < num_tokens && token < (task + 1) * kTokensPerTask; ++token)
      place(token);
  });
}

}  // namespace inferplane::INFERPLANE_LEVEL
