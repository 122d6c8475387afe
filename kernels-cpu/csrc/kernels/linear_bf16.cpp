// Few rows times a bfloat16 weight that lies as the checkpoint has it: every weight is read once, as a stream.
#include "bf16.h"
#include "kernel.h"

namespace inferplane::INFERPLANE_LEVEL {
namespace {

constexpr int kFeaturesPerTask = 64;

// Of two vectors of n numbers.
float dot(const bf16* a, const bf16* b, int64_t n) {
  int64_t i = 0;
#if INFERPLANE_HAS_AVX512
  __m512 low = _mm512_setzero_ps(), high = _mm512_setzero_ps();
  for (; i + 32 <= n; i += 32) {
#if INFERPLANE_HAS_AVX512_BF16
    low = _mm512_dpbf16_ps(low, (__m512bh)_mm512_loadu_si512(a + i), (__m512bh)_mm512_loadu_si512(b + i));
#else
    low = _mm512_fmadd_ps(widen16(a + i), widen16(b + i), low);
    high = _mm512_fmadd_ps(widen16(a + i + 16), widen16(b + i + 16), high);
#endif
  }
  float sum = _mm512_reduce_add_ps(_mm512_add_ps(low, high));
#else
  __m256 low = _mm256_setzero_ps(), high = _mm256_setzero_ps();
  for (; i + 16 <= n; i += 16) {
    low = _mm256_fmadd_ps(widen8(a + i), widen8(b + i), low);
    high = _mm256_fmadd_ps(widen8(a + i + 8), widen8(b + i + 8), high);
  }
  float sum = sum8(_mm256_add_ps(low, high));
#endif
  for (; i < n; ++i) sum += widen(a[i]) * widen(b[i]);
  return sum;
}

}  // namespace
}  // namespace inferplane::INFERPLANE_LEVEL

// x: [num_tokens, in_features], weight: [out_features, in_features], bias: [out_features] or null,
// out: [num_tokens, out_features]; all contiguous.
EXPORT(void, linear_bf16)
(const uint16_t* x, const uint16_t* weight, const uint16_t* bias, uint16_t* out, int64_t num_tokens,
 int64_t in_features, int64_t out_features) {
  using namespace inferplane;
  using namespace inferplane::INFERPLANE_LEVEL;
  parallel(int((out_features + kFeaturesPerTask - 1) / kFeaturesPerTask), [&](int task, int) {
    int64_t end = (task + 1) * int64_t(kFeaturesPerTask);
    if (end > out_features) end = out_features;
    for (int64_t feature = task * int64_t(kFeaturesPerTask); feature < end; ++feature)
      for (int64_t token = 0; token < num_tokens; ++token) {
        float sum = dot(x + token * in_features, weight + feature * in_features, in_features);
        out[token * out_features + feature] = narrow(bias == nullptr ? sum : sum + widen(bias[feature]));
      }
  });
}
RECORDABLE(linear_bf16)
