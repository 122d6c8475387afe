// What the sources of quantized products share at one level of instructions.
#pragma once

#include "bf16.h"
#include "kernel.h"
#include "quantized_matrix.h"

namespace inferplane::INFERPLANE_LEVEL {

constexpr int kRowsAtOnce = 32;  // of activations, whose sums are kept on the stack

// x: [num_rows, in_features], out: [num_rows, out_features], both contiguous.
void multiply_few_rows(const QuantizedMatrix& w, const bf16* x, bf16* out, int64_t num_rows);
#if INFERPLANE_HAS_AMX
void multiply_many_rows(const QuantizedMatrix& w, const bf16* x, bf16* out, int64_t num_rows);
#endif

// Rounds the sums of a strip, [num_rows][stride] float32, to the columns of out that are its own, bias added.
inline void write_strip(
    const QuantizedMatrix& w, int64_t strip, const float* sums, int64_t stride, bf16* out, int num_rows) {
  int64_t first = strip * kStrip;
  int size = int(w.out_features - first < kStrip ? w.out_features - first : kStrip);
#if INFERPLANE_HAS_AVX512
  __mmask16 lanes = __mmask16((1u << size) - 1);
  __m512 bias = w.bias == nullptr ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(lanes, w.bias + first);
  for (int row = 0; row < num_rows; ++row) {
    __m256i rounded = narrow16(_mm512_add_ps(_mm512_loadu_ps(sums + row * stride), bias));
    _mm256_mask_storeu_epi16(out + row * w.out_features + first, lanes, rounded);
  }
#else
  for (int row = 0; row < num_rows; ++row)
    for (int i = 0; i < size; ++i)
      out[row * w.out_features + first + i] =
          narrow(sums[row * stride + i] + (w.bias == nullptr ? 0 : w.bias[first + i]));
#endif
}

}  // namespace inferplane::INFERPLANE_LEVEL
