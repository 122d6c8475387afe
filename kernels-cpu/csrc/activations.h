// Activations of gated layers, as precise as float32.
#pragma once

#include "vec.h"

namespace inferplane::INFERPLANE_LEVEL {

inline Vec silu(Vec x) { return x / (all_of(1) + exp2(x * all_of(-kLog2E))); }

inline Vec gelu_tanh(Vec x) {
  Vec inner = x * fma(x * x, all_of(0.7978845608f * 0.044715f), all_of(0.7978845608f));
  // (1 + tanh(y)) / 2 is the logistic function of 2 y
  return x / (all_of(1) + exp2(inner * all_of(-2 * kLog2E)));
}

// g * sigmoid(alpha g) * (u + 1) with g the gate bounded from above and u the value from both sides.
inline Vec clamped_swiglu(Vec gate, Vec value, float alpha, float limit) {
  auto at_most_limit = [&](Vec a) { return all_of(0) - max(all_of(-limit), all_of(0) - a); };  // NaN stays
  Vec g = at_most_limit(gate), u = max(all_of(-limit), at_most_limit(value));
  return g / (all_of(1) + exp2(g * all_of(-alpha * kLog2E))) * (u + all_of(1));
}

}  // namespace inferplane::INFERPLANE_LEVEL
