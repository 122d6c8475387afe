#include "linear_product.h"

namespace inferplane::INFERPLANE_LEVEL {

template class Product<float>;
template class Product<bf16>;
template class Product<half>;

namespace {

void run(const LinearWeight& weight, const NormBefore* norm, const void* x, void* out, int64_t num_tokens,
         bool is_gated) {
  switch (weight.dtype) {
    case kFloat32: return Product<float>(weight, norm, x, out, num_tokens, is_gated).run();
    case kBfloat16: return Product<bf16>(weight, norm, x, out, num_tokens, is_gated).run();
    default: return Product<half>(weight, norm, x, out, num_tokens, is_gated).run();
  }
}

}  // namespace
}  // namespace inferplane::INFERPLANE_LEVEL

// x: [num_tokens, in_features]; out: [num_tokens, out_features] or, with a gate, half of that: silu(gate) * value, the
// gates being the first half of the weight's rows. All contiguous.
EXPORT(void, linear)
(const inferplane::LinearWeight* weight, const void* x, void* out, int64_t num_tokens, int32_t is_gated) {
  inferplane::INFERPLANE_LEVEL::run(*weight, nullptr, x, out, num_tokens, is_gated != 0);
}
RECORDABLE(linear)

// The same of rms_norm(x + residual) * norm_weight. residual becomes the sum; null stands for 0, and x is left as it is.
EXPORT(void, linear_after_norm)
(const inferplane::LinearWeight* weight, const void* x, void* residual, const void* norm_weight, float eps, void* out,
 int64_t num_tokens, int32_t is_gated) {
  inferplane::NormBefore norm{residual, norm_weight, eps};
  inferplane::INFERPLANE_LEVEL::run(*weight, &norm, x, out, num_tokens, is_gated != 0);
}
RECORDABLE(linear_after_norm)
