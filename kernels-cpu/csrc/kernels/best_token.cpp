// The largest number of each row. Floats are compared as integers, which order alike once the sign is no bit of its own:
// no arithmetic of floats is in the way of vectors, and what is not a number lies beyond infinity.
#include "kernel.h"

namespace inferplane::INFERPLANE_LEVEL {
namespace {

constexpr int64_t kBlock = 1024;
constexpr int64_t kBytesPerTask = 128 << 10;  // fewer are read sooner than another thread is told of them

// Orders as the float of these bits does; both zeros are 0.
template <class Int>
inline Int ordinal(Int bits) {
  constexpr Int magnitude = Int(~(Int(1) << (sizeof(Int) * 8 - 1)));
  Int sign = Int(bits >> (sizeof(Int) * 8 - 1));
  return Int(((bits & magnitude) ^ sign) - sign);
}

// The index of the largest of n numbers, the first of several; -1 where it is not finite or some are no numbers.
template <class Int>
int64_t best_of(const Int* row, int64_t n, Int infinity) {
  Int best = Int(-infinity - 1), worst = 0;  // by magnitude
  for (int64_t i = 0; i < n; ++i) {
    Int value = ordinal(row[i]);
    Int magnitude = value < 0 ? Int(-value) : value;
    best = value > best ? value : best;
    worst = magnitude > worst ? magnitude : worst;
  }
  if (best >= infinity || best <= -infinity || worst > infinity) return -1;
  for (int64_t start = 0; start < n; start += kBlock) {
    int64_t end = start + kBlock < n ? start + kBlock : n;
    Int is_here = 0;
    for (int64_t i = start; i < end; ++i) is_here |= Int(ordinal(row[i]) == best);
    for (int64_t i = start; is_here && i < end; ++i)
      if (ordinal(row[i]) == best) return i;
  }
  return -1;
}

template <class Int>
void best_token(const Int* logits, int64_t* out, int64_t num_rows, int64_t vocab_size, int64_t stride, Int infinity) {
  int64_t rows_per_task = kBytesPerTask / (vocab_size * int64_t(sizeof(Int))) + 1;
  parallel(int((num_rows + rows_per_task - 1) / rows_per_task), [&](int task, int) {
    int64_t end = (task + 1) * rows_per_task;
    if (end > num_rows) end = num_rows;
    for (int64_t row = task * rows_per_task; row < end; ++row) {
      int64_t best = best_of(logits + row * stride, vocab_size, infinity);
      out[row] = best < 0 ? 0 : best;
      out[num_rows + row] = best < 0;
    }
  });
}

}  // namespace
}  // namespace inferplane::INFERPLANE_LEVEL

// logits: [num_rows, vocab_size], rows stride elements apart; out: [2, num_rows], indices and 0, or 0 and 1 for none.
EXPORT(void, best_token_float32)
(const int32_t* logits, int64_t* out, int64_t num_rows, int64_t vocab_size, int64_t stride) {
  inferplane::INFERPLANE_LEVEL::best_token<int32_t>(logits, out, num_rows, vocab_size, stride, 0x7f800000);
}

EXPORT(void, best_token_bfloat16)
(const int16_t* logits, int64_t* out, int64_t num_rows, int64_t vocab_size, int64_t stride) {
  inferplane::INFERPLANE_LEVEL::best_token<int16_t>(logits, out, num_rows, vocab_size, stride, 0x7f80);
}

EXPORT(void, best_token_float16)
(const int16_t* logits, int64_t* out, int64_t num_rows, int64_t vocab_size, int64_t stride) {
  inferplane::INFERPLANE_LEVEL::best_token<int16_t>(logits, out, num_rows, vocab_size, stride, 0x7c00);
}
