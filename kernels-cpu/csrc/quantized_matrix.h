// A matrix of whole numbers of 4 or 8 bits whose scales, and what is added after them, are for groups of columns:
//
//   value = (code - zero) * scale + minimum
//
// Rows of the matrix (output features) lie in strips of 16, so that a vector holds one column pair of each. A strip is
//
//   codes     for every (16 * kWord / bits) columns 16 words of 32 bits, one a row; see column_shift
//   scales    [num_groups][16], float16 or float32
//   minimums  the same, if there are any
//
// padded to 64 bytes. Rows that fill up the last strip have scale and minimum 0.
#pragma once

#include <cstdint>

namespace inferplane {

constexpr int kStrip = 16;

struct QuantizedMatrix {
  const uint8_t* strips;
  const float* bias;  // [out_features], or null
  int64_t out_features, in_features;
  int64_t strip_bytes;
  int64_t scale_offset, minimum_offset;  // in a strip
  int32_t bits;                          // 4 or 8
  int32_t zero;                          // the code that stands for 0
  int32_t group;                         // columns that share a scale: a multiple of 16
  int32_t unit;                          // columns that are summed up as whole numbers: 32, or 16 if group needs it
  int32_t num_units;                     // they cover in_features; the last may reach beyond it, with codes of 0
  int32_t scale_bytes;                   // 2 or 4
  int32_t has_minimum;
  int32_t spare_bits;  // of 8: codes differ from 128 by what fits in the others
};

// The columns of one 32-bit word: 8 of 4 bits, or 4 of 8.
inline int columns_per_word(int bits) { return 32 / bits; }

// Where a column lies in its word: neighbours are in the two halves, so that a shift and a mask make 16-bit pairs.
inline int column_shift(int column, int bits) { return 16 * (column & 1) + bits * (column >> 1); }

}  // namespace inferplane
