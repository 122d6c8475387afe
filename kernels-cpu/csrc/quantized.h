// What the sources of quantized products share at one level of instructions.
#pragma once

#include "kernel.h"
#include "quantized_matrix.h"
#include "vec.h"

namespace inferplane::INFERPLANE_LEVEL {

constexpr int kRowsAtOnce = 32;  // of activations, whose sums are kept on the stack

// x: [num_rows, in_features], out: [num_rows, out_features], both contiguous, of float or bf16.
template <class X>
void multiply_few_rows(const QuantizedMatrix& w, const X* x, X* out, int64_t num_rows);
#if INFERPLANE_HAS_AMX
template <class X>
void multiply_many_rows(const QuantizedMatrix& w, const X* x, X* out, int64_t num_rows);
#endif

// Writes the sums of a strip, [num_rows][16] float32, times `scale` to the columns of out that are its own, bias added.
template <class X>
inline void write_strip(
    const QuantizedMatrix& w, int64_t strip, const float* sums, Vec scale, X* out, int num_rows) {
  int64_t first = strip * kStrip;
  int size = int(w.out_features - first < kStrip ? w.out_features - first : kStrip);
  Vec bias = w.bias == nullptr ? all_of(0) : load(w.bias + first, size);
  for (int row = 0; row < num_rows; ++row) {
    X* to = out + row * w.out_features + first;
    Vec values = fma(load(sums + row * kStrip), scale, bias);
    if (size == kStrip)
      store(to, values);
    else
      store(to, values, size);
  }
}

}  // namespace inferplane::INFERPLANE_LEVEL
