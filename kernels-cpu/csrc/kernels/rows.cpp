// Rows of a matrix, moved as they are.
#include "kernel.h"

namespace inferplane::INFERPLANE_LEVEL {
namespace {

constexpr int64_t kBytesPerTask = 64 << 10;  // fewer are copied sooner than another thread is told of them

}  // namespace
}  // namespace inferplane::INFERPLANE_LEVEL

// out[i] = table[ids[i]], for rows of row_bytes; ids are rows of the table.
EXPORT(void, take_rows)
(void* out, const void* table, const int64_t* ids, int64_t num_rows, int64_t row_bytes) {
  using namespace inferplane;
  using namespace inferplane::INFERPLANE_LEVEL;
  int64_t rows_per_task = kBytesPerTask / row_bytes + 1;
  auto* to = static_cast<char*>(out);
  auto* from = static_cast<const char*>(table);
  parallel(int((num_rows + rows_per_task - 1) / rows_per_task), [&](int task, int) {
    int64_t end = (task + 1) * rows_per_task;
    if (end > num_rows) end = num_rows;
    for (int64_t row = task * rows_per_task; row < end; ++row)
      std::memcpy(to + row * row_bytes, from + ids[row] * row_bytes, size_t(row_bytes));
  });
}
RECORDABLE(take_rows)

EXPORT(void, copy_bytes)(void* out, const void* from, int64_t num_bytes) { std::memcpy(out, from, size_t(num_bytes)); }
RECORDABLE(copy_bytes)
