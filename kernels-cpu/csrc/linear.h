// Products with a weight that lies as the checkpoint has it: y = x @ weight.T + bias, with norm before and gate behind.
//
// The weight is the left factor, one row for each output feature, and tokens are the columns of the right one. So AMX tiles
// and broadcasts take the weight from where it lies: it is neither packed nor copied, may be shared with an embedding or
// mapped from a file, and is read once as a stream. What is packed anew in each call is the activations, which are small.
#pragma once

#include "kernel.h"

namespace inferplane {

enum DType : int64_t { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };

// What inferplane_kernels_cpu.linear fills in once for each weight.
struct LinearWeight {
  const void* weight;  // [out_features, in_features], contiguous
  const void* bias;    // [out_features], or null
  int64_t in_features, out_features;
  int64_t dtype;  // of weight, bias, activations and outputs; sums are float32
};

// x becomes rms_norm(x + residual) before the product.
struct NormBefore {
  void* residual;      // [num_tokens, in_features], overwritten with the sum; null: only the norm
  const void* weight;  // [in_features]
  float eps;
};

}  // namespace inferplane
