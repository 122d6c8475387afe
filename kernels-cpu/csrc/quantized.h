// What the sources of quantized products share at one level of instructions.
#pragma once

#include "kernel.h"
#include "linear_outputs.h"
#include "linear_tokens.h"
#include "quantized_matrix.h"
#include "vec.h"

namespace inferplane::INFERPLANE_LEVEL {

constexpr int kRowsAtOnce = 32;  // of activations, whose sums are kept on the stack

// What is multiplied by a matrix, and where the product goes; X is float or bf16, everything is contiguous.
template <class X>
struct Rows {
  const X* x;              // [num_rows, in_features]
  const NormBefore* norm;  // or null
  X* out;                  // [num_rows, width]
  int64_t num_rows;
  bool is_gated;  // out is silu(gate) * value, the gates being the first half of the matrix: a multiple of 16

  // Of a row, normed if it has to be, in `room` for in_features.
  const X* row(const QuantizedMatrix& w, int64_t index, X* room) const {
    if (norm == nullptr) return x + index * w.in_features;
    norm_row(x, *norm, index, w.in_features, room);
    return room;
  }

  // Strips of the matrix that make one of the result, and how far they are apart.
  int strips_each() const { return is_gated ? 2 : 1; }
  int num_strips(const QuantizedMatrix& w) const {
    return int((w.out_features / strips_each() + kStrip - 1) / kStrip);
  }

  // Writes strip `index` of a row of the result. sums: of each strip of the matrix that makes it, `stride` apart;
  // scales: what they are to be multiplied by, or null.
  void write(const QuantizedMatrix& w, int64_t row, int index, const float* sums, int64_t stride,
             const float* scales) const {
    int64_t width = w.out_features / strips_each(), first = int64_t(index) * kStrip;
    int size = int(width - first < kStrip ? width - first : kStrip);
    auto value = [&](int which) {
      Vec sum = load(sums + which * stride);
      if (scales != nullptr) sum = sum * load(scales + which * kStrip);
      return w.bias == nullptr ? sum : sum + load(w.bias + which * width + first, size);
    };
    X* to = out + row * width + first;
    Vec result = is_gated ? silu<X>(value(0)) * value(1) : value(0);
    size == kStrip ? store(to, result) : store(to, result, size);
  }
};

template <class X>
void multiply_few_rows(const QuantizedMatrix& w, const Rows<X>& rows);
#if INFERPLANE_HAS_AMX
template <class X>
void multiply_many_rows(const QuantizedMatrix& w, const Rows<X>& rows);
#endif
#if !INFERPLANE_HAS_AVX512_VNNI
template <class X>
void multiply_widened_rows(const QuantizedMatrix& w, const Rows<X>& rows);
#endif

}  // namespace inferplane::INFERPLANE_LEVEL
