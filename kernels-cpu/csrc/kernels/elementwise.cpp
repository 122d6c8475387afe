// Norms, rotary embedding and gated activations: each row is read once and written once.
#include "activations.h"
#include "heads.h"

namespace inferplane::INFERPLANE_LEVEL {
namespace {

// Fewer numbers are done sooner by the caller alone than another thread is woken.
constexpr int64_t kNumbersWorthThreads = 32 << 10;

// Calls fn(row) for every row, of `row_size` numbers each.
template <class Fn>
void for_each_row(int64_t num_rows, int64_t row_size, const Fn& fn) {
  int64_t rows_per_task = kNumbersWorthThreads / 4 / row_size + 1;
  if (num_rows * row_size < kNumbersWorthThreads) rows_per_task = num_rows;
  if (num_rows == 0) return;
  parallel(int((num_rows + rows_per_task - 1) / rows_per_task), [&](int task, int) {
    int64_t end = (task + 1) * rows_per_task;
    if (end > num_rows) end = num_rows;
    for (int64_t row = task * rows_per_task; row < end; ++row) fn(row);
  });
}

// Calls fn(at, n) for each sixteen of `size` numbers; n < 16 for the last ones.
template <class Fn>
inline void for_each_vector(int64_t size, const Fn& fn) {
  int64_t at = 0;
  for (; at + 16 <= size; at += 16) fn(at, 16);
  if (at < size) fn(at, int(size - at));
}

template <class T>
inline Vec take(const T* from, int n) {
  return n == 16 ? load(from) : load(from, n);
}
template <class T>
inline void put(T* to, Vec values, int n) {
  n == 16 ? store(to, values) : store(to, values, n);
}

// With a residual x is added to it first. The sum is rounded to T, and normed so.
template <class T>
void norm_rows(T* out, const T* x, T* residual, const T* weight, int64_t num_rows, int64_t dim, int64_t x_stride,
               float eps) {
  for_each_row(num_rows, dim, [&](int64_t row) {
    const T* from = x + row * x_stride;
    Vec squares = all_of(0);
    if (residual != nullptr) {
      T* total = residual + row * dim;
      for_each_vector(dim, [&](int64_t at, int n) {
        put(total + at, take(from + at, n) + take(total + at, n), n);
        Vec sum = take(total + at, n);
        squares = fma(sum, sum, squares);
      });
      from = total;
    } else {
      for_each_vector(dim, [&](int64_t at, int n) {
        Vec part = take(from + at, n);
        squares = fma(part, part, squares);
      });
    }
    Vec inverse = all_of(1 / __builtin_sqrtf(sum_of(squares) / float(dim) + eps));
    T* to = out + row * dim;
    for_each_vector(dim, [&](int64_t at, int n) { put(to + at, take(from + at, n) * inverse * take(weight + at, n), n); });
  });
}

template <class T, Vec (*activate)(Vec)>
void gate_rows(T* out, const T* gate_up, int64_t num_rows, int64_t dim, int64_t stride) {
  for_each_row(num_rows, dim, [&](int64_t row) {
    const T *gate = gate_up + row * stride, *up = gate + dim;
    T* to = out + row * dim;
    for_each_vector(dim, [&](int64_t at, int n) { put(to + at, activate(take(gate + at, n)) * take(up + at, n), n); });
  });
}

template <class T>
void turn_rows(T* heads, int64_t num_tokens, int64_t num_heads, int64_t head_dim, int64_t stride,
               const int64_t* positions, const float* cos_sin, int64_t rotary_dim) {
  for_each_row(num_tokens, num_heads * head_dim, [&](int64_t token) {
    for (int64_t head = 0; head < num_heads; ++head) {
      T* at = heads + token * stride + head * head_dim;
      turn_head<T>(at, at, int(head_dim), nullptr, 0, cos_sin + positions[token] * rotary_dim, int(rotary_dim));
    }
  });
}

template <class T>
T* as(void* pointer) {
  return static_cast<T*>(pointer);
}
template <class T>
const T* as(const void* pointer) {
  return static_cast<const T*>(pointer);
}

}  // namespace
}  // namespace inferplane::INFERPLANE_LEVEL

// dtype: 0 float32, 1 bfloat16, 2 float16. All rows are contiguous; a stride is that of rows, in elements.
#define FOR_DTYPE(call)                    \
  using namespace inferplane::INFERPLANE_LEVEL; \
  if (dtype == 0) {                        \
    using T = float;                       \
    call;                                  \
  } else if (dtype == 1) {                 \
    using T = bf16;                        \
    call;                                  \
  } else {                                 \
    using T = half;                        \
    call;                                  \
  }

// out = norm(x) * weight: [num_rows, dim].
EXPORT(void, rms_norm)
(void* out, const void* x, const void* weight, int64_t num_rows, int64_t dim, int64_t stride, float eps,
 int32_t dtype) {
  FOR_DTYPE(norm_rows<T>(as<T>(out), as<T>(x), nullptr, as<T>(weight), num_rows, dim, stride, eps))
}
RECORDABLE(rms_norm)

// residual += x, out = norm(residual) * weight.
EXPORT(void, add_rms_norm)
(void* out, const void* x, void* residual, const void* weight, int64_t num_rows, int64_t dim, int64_t stride, float eps,
 int32_t dtype) {
  FOR_DTYPE(norm_rows<T>(as<T>(out), as<T>(x), as<T>(residual), as<T>(weight), num_rows, dim, stride, eps))
}
RECORDABLE(add_rms_norm)

// out = silu(gate) * up: [num_rows, dim] of [num_rows, 2 dim], the gate first.
EXPORT(void, silu_and_mul)
(void* out, const void* gate_up, int64_t num_rows, int64_t dim, int64_t stride, int32_t dtype) {
  FOR_DTYPE((gate_rows<T, silu>(as<T>(out), as<T>(gate_up), num_rows, dim, stride)))
}
RECORDABLE(silu_and_mul)

EXPORT(void, gelu_tanh_and_mul)
(void* out, const void* gate_up, int64_t num_rows, int64_t dim, int64_t stride, int32_t dtype) {
  FOR_DTYPE((gate_rows<T, gelu_tanh>(as<T>(out), as<T>(gate_up), num_rows, dim, stride)))
}
RECORDABLE(gelu_tanh_and_mul)

// Turns heads: [num_tokens, num_heads, head_dim] where they lie, by positions: [num_tokens] and
// cos_sin: [max_positions, rotary_dim].
EXPORT(void, rotary)
(void* heads, int64_t num_tokens, int64_t num_heads, int64_t head_dim, int64_t stride, const int64_t* positions,
 const float* cos_sin, int64_t rotary_dim, int32_t dtype) {
  FOR_DTYPE(turn_rows<T>(as<T>(heads), num_tokens, num_heads, head_dim, stride, positions, cos_sin, rotary_dim))
}
RECORDABLE(rotary)
