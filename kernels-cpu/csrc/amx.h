// AMX tiles of 16 rows of 64 bytes: all eight are configured alike.
#pragma once

#include "kernel.h"

#if INFERPLANE_HAS_AMX

namespace inferplane::INFERPLANE_LEVEL {

// While it lives, the thread's tiles are 16 × 64 bytes each. Not to be nested.
class Tiles {
 public:
  Tiles() {
    struct alignas(64) Configuration {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t num_rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } configuration;
    // gcc 12 believes that the instruction reads 8 bytes, and leaves out what fills the others
    asm volatile("" ::"r"(&configuration) : "memory");
    _tile_loadconfig(&configuration);
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

}  // namespace inferplane::INFERPLANE_LEVEL

#endif
