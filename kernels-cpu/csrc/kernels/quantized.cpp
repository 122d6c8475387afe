// Matrices that are multiplied by in their quantized form: packing, rows as they stand, and the product.
#include "kernel.h"
#include "program.h"
#include "quantized.h"

namespace inferplane::INFERPLANE_LEVEL {
namespace {

// From here on the rows of activations outweigh turning the codes into tiles. Codes of 8 bits take no unpacking before.
#if INFERPLANE_HAS_AMX
constexpr int64_t kManyRowsOf4Bits = 9, kManyRowsOf8Bits = 12;
#elif !INFERPLANE_HAS_AVX512_VNNI
constexpr int64_t kManyWidenedRows = 13;  // the same for floats
#endif

inline float widen_half(const uint8_t* from) {
  uint16_t bits;
  std::memcpy(&bits, from, 2);
  return _cvtsh_ss(bits);
}

inline float read_scale(const uint8_t* from, int index, int scale_bytes) {
  if (scale_bytes == 2) return widen_half(from + index * 2);
  float value;
  std::memcpy(&value, from + index * 4, 4);
  return value;
}

inline void write_scale(uint8_t* to, int index, int scale_bytes, float value) {
  if (scale_bytes == 2) {
    uint16_t bits = uint16_t(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT));
    std::memcpy(to + index * 2, &bits, 2);
  } else {
    std::memcpy(to + index * 4, &value, 4);
  }
}

// Codes that follow each other, as a word whose halves have the even and the odd ones: what column_shift says.
inline uint32_t in_halves(uint32_t codes, int bits) {
  uint32_t even = bits == 4 ? 0x0f0f0f0f : 0x00ff00ff;
  return _pext_u32(codes, even) | _pext_u32(codes, ~even) << 16;
}

void pack_strip(const QuantizedMatrix& w, int64_t first_row, const uint8_t* codes, int64_t row_bytes,
                const float* scales, const float* minimums, uint8_t* strip) {
  int64_t num_groups = (w.in_features + w.group - 1) / w.group;
  std::memset(strip, 0, size_t(w.strip_bytes));
  for (int lane = 0; lane < kStrip && first_row + lane < w.out_features; ++lane) {
    const uint8_t* row = codes + (first_row + lane) * row_bytes;
    for (int64_t first = 0; first < row_bytes; first += 4) {
      uint32_t codes_in_order = 0;
      std::memcpy(&codes_in_order, row + first, size_t(row_bytes - first < 4 ? row_bytes - first : 4));
      uint32_t word = in_halves(codes_in_order, w.bits);
      std::memcpy(strip + (first / 4 * kStrip + lane) * 4, &word, 4);
    }
    for (int64_t group = 0; group < num_groups; ++group) {
      int64_t from = (first_row + lane) * num_groups + group;
      int to = int(group * kStrip + lane);
      write_scale(strip + w.scale_offset, to, w.scale_bytes, scales[from]);
      if (w.has_minimum) write_scale(strip + w.minimum_offset, to, w.scale_bytes, minimums[from]);
    }
  }
}

template <class Store>
void read_row(const QuantizedMatrix& w, int64_t index, const Store& store) {
  const uint8_t* strip = w.strips + index / kStrip * w.strip_bytes;
  int lane = int(index % kStrip), columns = columns_per_word(w.bits);
  uint32_t mask = (1u << w.bits) - 1;
  float scale = 0, minimum = 0;
  for (int64_t first = 0; first < w.in_features; first += columns) {
    if (first % w.group == 0) {
      int at = int(first / w.group * kStrip + lane);
      scale = read_scale(strip + w.scale_offset, at, w.scale_bytes);
      minimum = w.has_minimum ? read_scale(strip + w.minimum_offset, at, w.scale_bytes) : 0;
    }
    uint32_t word;
    std::memcpy(&word, strip + (first / columns * kStrip + lane) * 4, 4);
    int size = int(w.in_features - first < columns ? w.in_features - first : columns);
    for (int column = 0; column < size; ++column) {
      float code = float(int32_t((word >> column_shift(column, w.bits)) & mask) - w.zero);
      store(first + column, code, scale, minimum);
    }
  }
}

template <class X>
void multiply(const QuantizedMatrix& w, const Rows<X>& rows) {
#if INFERPLANE_HAS_AMX
  if (rows.num_rows >= (w.bits == 4 ? kManyRowsOf4Bits : kManyRowsOf8Bits)) return multiply_many_rows(w, rows);
#elif !INFERPLANE_HAS_AVX512_VNNI
  if (rows.num_rows >= kManyWidenedRows) return multiply_widened_rows(w, rows);
#endif
  multiply_few_rows(w, rows);
}

void multiply(const QuantizedMatrix& w, int32_t dtype, const void* x, const NormBefore* norm, void* out,
              int64_t num_rows, bool is_gated) {
  if (dtype == kFloat32)
    multiply(w, Rows<float>{static_cast<const float*>(x), norm, static_cast<float*>(out), num_rows, is_gated});
  else
    multiply(w, Rows<bf16>{static_cast<const bf16*>(x), norm, static_cast<bf16*>(out), num_rows, is_gated});
}

}  // namespace
}  // namespace inferplane::INFERPLANE_LEVEL

// codes: [out_features, row_bytes], of 8 bits one a byte, of 4 bits two, the even column's in the low half; scales and
// minimums: float32 [out_features, num_groups]. Writes w's strips, which `strips` points to.
EXPORT(void, quantized_pack)
(const inferplane::QuantizedMatrix* w, const uint8_t* codes, int64_t row_bytes, const float* scales,
 const float* minimums, uint8_t* strips) {
  using namespace inferplane;
  using namespace inferplane::INFERPLANE_LEVEL;
  parallel(int((w->out_features + kStrip - 1) / kStrip), [&](int strip, int) {
    pack_strip(*w, int64_t(strip) * kStrip, codes, row_bytes, scales, minimums, strips + strip * w->strip_bytes);
  });
}

// out: [num_rows, in_features], the rows of the matrix that index names. Product and sum are rounded one by one.
EXPORT(void, quantized_rows)
(const inferplane::QuantizedMatrix* w, const int64_t* index, int64_t num_rows, float* wide, uint16_t* out) {
  using namespace inferplane;
  using namespace inferplane::INFERPLANE_LEVEL;
  constexpr int kRowsPerTask = 16;
  parallel(int((num_rows + kRowsPerTask - 1) / kRowsPerTask), [&](int task, int) {
    int64_t end = (task + 1) * int64_t(kRowsPerTask) < num_rows ? (task + 1) * int64_t(kRowsPerTask) : num_rows;
    for (int64_t row = task * int64_t(kRowsPerTask); row < end; ++row)
      read_row(*w, index[row], [&](int64_t column, float code, float scale, float minimum) {
        float product = code * scale;
        asm volatile("" : "+x"(product));  // or the compiler fuses the two into one rounding
        float value = product + minimum;
        if (wide != nullptr)
          wide[row * w->in_features + column] = value;
        else
          out[row * w->in_features + column] = narrow(value);
      });
  });
}

RECORDABLE(quantized_rows)

// x: [num_rows, in_features]; out: [num_rows, out_features] or, with a gate, half of that: silu(gate) * value, the gates
// being the first half of the matrix, a multiple of 16. All contiguous, of a DType that is float32 or bfloat16.
EXPORT(void, quantized_multiply)
(const inferplane::QuantizedMatrix* w, int32_t dtype, const void* x, void* out, int64_t num_rows, int32_t is_gated) {
  inferplane::INFERPLANE_LEVEL::multiply(*w, dtype, x, nullptr, out, num_rows, is_gated != 0);
}
RECORDABLE(quantized_multiply)

// The same of rms_norm(x + residual) * norm_weight. residual becomes the sum; null stands for 0, and x is left as it is.
EXPORT(void, quantized_multiply_after_norm)
(const inferplane::QuantizedMatrix* w, int32_t dtype, const void* x, void* residual, const void* norm_weight, float eps,
 void* out, int64_t num_rows, int32_t is_gated) {
  inferplane::NormBefore norm{residual, norm_weight, eps};
  inferplane::INFERPLANE_LEVEL::multiply(*w, dtype, x, &norm, out, num_rows, is_gated != 0);
}
RECORDABLE(quantized_multiply_after_norm)
