// The activations of a product: normed on demand, and packed as columns for the multiplication.
#pragma once

#include "linear.h"
#include "transpose.h"
#include "vec.h"

namespace inferplane::INFERPLANE_LEVEL {

constexpr int kPanel = 16;  // tokens that lie together

// Whether two numbers of T lie together as a pair, for instructions that multiply pairs; else they are widened to float.
template <class T>
constexpr bool kIsPaired = false;
#if INFERPLANE_HAS_AVX512_BF16
template <>
inline constexpr bool kIsPaired<bf16> = true;
#endif

// Depth is padded with zeros to what an AMX tile holds.
template <class T>
constexpr int kDepthStep = kIsPaired<T> ? 32 : 1;

template <class T>
inline int64_t padded_depth(int64_t depth) {
  return (depth + kDepthStep<T> - 1) / kDepthStep<T> * kDepthStep<T>;
}

// Floats of storage that one panel takes.
template <class T>
inline int64_t panel_floats(int64_t depth) {
  return padded_depth<T>(depth) * kPanel / (kIsPaired<T> ? 2 : 1);
}

// One row of rms_norm(x + residual), rounded where the op rounds: the sum, the normed value, and its product.
template <class T>
inline void norm_row(const T* x, const NormBefore& norm, int64_t row, int64_t size, T* out) {
  // whole vectors are read and written without masks, which would keep what follows from reading behind the writing
  auto get = [&](const T* from, int64_t i) { return size - i >= 16 ? load(from + i) : load(from + i, int(size - i)); };
  auto put = [&](T* to, int64_t i, Vec a) { size - i >= 16 ? store(to + i, a) : store(to + i, a, int(size - i)); };
  const T* total = x + row * size;
  Vec squares[2] = {all_of(0), all_of(0)};
  auto add_square = [&](int64_t i, Vec value) { squares[i / 16 % 2] = fma(value, value, squares[i / 16 % 2]); };
  if (norm.residual != nullptr) {
    T* residual = static_cast<T*>(norm.residual) + row * size;
    for (int64_t i = 0; i < size; i += 16) {
      Vec sum = rounded<T>(get(total, i) + get(residual, i));
      put(residual, i, sum);
      add_square(i, sum);
    }
    total = residual;
  } else {
    for (int64_t i = 0; i < size; i += 16) add_square(i, get(total, i));
  }
  float mean = sum_of(squares[0] + squares[1]) / float(size);
  Vec inverse = all_of(1 / __builtin_sqrtf(mean + norm.eps));
  const T* weight = static_cast<const T*>(norm.weight);
  for (int64_t i = 0; i < size; i += 16) put(out, i, rounded<T>(get(total, i) * inverse) * get(weight, i));
}

// Packs up to 16 rows of x, normed or not, as one panel: [depth / 2][16 tokens][2] pairs or [depth][16 tokens] floats.
template <class T>
void pack_panel(const T* x, const NormBefore* norm, int64_t first, int num_rows, int64_t depth, float* panel) {
  // the rows as numbers of four bytes, padded with zeros to whole blocks: where they lie, or copied
  int64_t width = kIsPaired<T> ? padded_depth<T>(depth) / 2 : (depth + 15) / 16 * 16;
  bool can_be_read = norm == nullptr && num_rows == kPanel && sizeof(T) == (kIsPaired<T> ? 2 : 4) &&
                     width * 4 == depth * int64_t(sizeof(T));
  float* copies = nullptr;
  T* normed = nullptr;
  if (!can_be_read) {
    copies = static_cast<float*>(thread_scratch(kPanel * width * sizeof(float) + depth * sizeof(T)));
    normed = reinterpret_cast<T*>(copies + kPanel * width);
  }
  const float* rows[kPanel];
  for (int row = 0; row < kPanel; ++row) {
    const T* from = x + (first + row) * depth;
    if (can_be_read) {
      rows[row] = reinterpret_cast<const float*>(from);
      continue;
    }
    float* to = copies + row * width;
    rows[row] = to;
    if (row >= num_rows) {
      std::memset(to, 0, width * sizeof(float));
      continue;
    }
    if constexpr (kIsPaired<T>) {
      T* pairs = reinterpret_cast<T*>(to);
      if (norm != nullptr)
        norm_row(x, *norm, first + row, depth, pairs);
      else
        std::memcpy(pairs, from, depth * sizeof(T));
      std::memset(pairs + depth, 0, (2 * width - depth) * sizeof(T));
    } else {
      if (norm != nullptr) {
        norm_row(x, *norm, first + row, depth, normed);
        from = normed;
      }
      int64_t i = 0;
      for (; i + 16 <= depth; i += 16) store(to + i, load(from + i));
      if (i < depth) store(to + i, load(from + i, int(depth - i)));
    }
  }
  const float* block[kPanel];
  for (int64_t column = 0; column < width; column += 16) {
    for (int row = 0; row < kPanel; ++row) block[row] = rows[row] + column;
    int64_t left = panel_floats<T>(depth) / kPanel - column;
    if (left >= 16) {
      transpose_16x16(block, panel + column * kPanel, kPanel);
    } else {
      float last[16 * kPanel];
      transpose_16x16(block, last, kPanel);
      std::memcpy(panel + column * kPanel, last, left * kPanel * sizeof(float));
    }
  }
}

}  // namespace inferplane::INFERPLANE_LEVEL
