// The softmax of attention, chunk by chunk of the keys: scores become weights, and what was summed before is scaled to the
// highest score so far.
#pragma once

#include "attention_step.h"
#include "panel_product.h"

namespace inferplane::INFERPLANE_LEVEL {

constexpr int kChunk = 256;  // keys whose scores are computed at a time; a piece is one chunk

// Results so far: what is not yet divided by the softmax's denominator.
struct Softmax {
  float* sums;     // [num_rows, padded_dim]
  float* highest;  // [num_rows]: the highest exponent of 2 among the scores
  float* weights;  // [num_rows]: the denominator
};

// Where the weights of a row go.
template <class T>
struct PlainWeights {
  Left<T>* row;
  void put(int at, Vec values) const { store(row + at, values); }
  void put_both(int at, Vec first, Vec second) const { store_both(row + at, first, second); }
};

#if INFERPLANE_HAS_AMX
// Two sections of num_keys: high halves, and low ones.
struct SplitWeights {
  bf16* row;
  int num_keys;
  void put(int at, Vec values) const {
    Halves halves = halves_of(values);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(row + at), halves.high);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(row + num_keys + at), halves.low);
  }
  void put_both(int at, Vec first, Vec second) const {
    put(at, first);
    put(at + 16, second);
  }
};
#endif

// Scores of some rows of a request with the keys of a chunk. T: of keys and values as they are stored.
template <class T>
struct Scores {
  const LayerShape& layer;
  float* scores;  // [num_rows, kChunk]
  int past;       // tokens of the request before its row 0
  int group;      // rows of each token
  int first_row, num_rows;
  int first_key, num_keys;

  // Turns them into weights, which `weights_of(row)` takes, and scales what was summed before, if anything was.
  template <class WeightsOf>
  void weigh(const Softmax& softmax, bool is_first, const WeightsOf& weights_of) const {
    for (int row = 0; row < num_rows; row += 16) weigh_rows(row, softmax, is_first, weights_of);
  }

 private:
  // Of up to 16 rows from `start` on, whose numbers are lanes of one vector.
  template <class WeightsOf>
  void weigh_rows(int start, const Softmax& softmax, bool is_first, const WeightsOf& weights_of) const {
    float factor = layer.soft_cap > 0 ? kLog2E : layer.scale * kLog2E;
    int count = num_rows - start < 16 ? num_rows - start : 16, padded_dim = round_up(layer.head_dim, 16);
    Vec lanes[16];
    int from[16], to[16];  // keys that a row sees, to whole vectors
    for (int row = 0; row < count; ++row) {
      int position = past + (first_row + start + row) / group;
      int low = layer.first_visible(position) - first_key, high = position + 1 - first_key;
      if (low < 0) low = 0;
      if (high > num_keys) high = num_keys;
      from[row] = low / 16 * 16;
      to[row] = high > low ? round_up(high, 16) : from[row];
      lanes[row] = all_of(-__builtin_inff());
      if (to[row] == from[row]) continue;
      float* own = scores + (start + row) * kChunk;
      if (layer.soft_cap > 0) cap(own, from[row], to[row]);
      for (int at = from[row]; at < low; ++at) own[at] = -__builtin_inff();
      for (int at = high; at < to[row]; ++at) own[at] = -__builtin_inff();
      lanes[row] = highest_of(own, from[row], to[row]);
    }
    for (int row = count; row < 16; ++row) lanes[row] = all_of(0);
    float *highest = softmax.highest + start, *sums = softmax.weights + start;
    Vec before = load(highest), now = max(before, max_of_each(lanes) * all_of(factor));
    // a row that has seen nothing yet has minus infinity, from which nothing can be subtracted
    Vec shift = all_of(0) - max(now, all_of(-__FLT_MAX__)), scaled = exp2(before + shift);
    store(highest, now);
    float shifts[16], scales[16], befores[16];
    store(shifts, shift);
    store(scales, scaled);
    store(befores, before);
    for (int row = 0; row < count; ++row) {
      auto own = weights_of(start + row);
      for (int at = 0; at < from[row]; at += 16) own.put(at, all_of(0));
      for (int at = to[row]; at < num_keys; at += 16) own.put(at, all_of(0));
      lanes[row] = raise(scores + (start + row) * kChunk, own, from[row], to[row], factor, shifts[row]);
      if (is_first || befores[row] == highest[row]) continue;
      float* summed = softmax.sums + (start + row) * padded_dim;
      for (int at = 0; at < padded_dim; at += 16) store(summed + at, load(summed + at) * all_of(scales[row]));
    }
    store(sums, fma(load(sums), scaled, sum_of_each(lanes)));
  }

  static Vec highest_of(const float* scores, int from, int to) {
    Vec even = load(scores + from), odd = even;
    int at = from + 16;
    for (; at + 32 <= to; at += 32) {
      even = max(even, load(scores + at));
      odd = max(odd, load(scores + at + 16));
    }
    return max(odd, at < to ? max(even, load(scores + at)) : even);
  }

  // Writes 2 ** (scores * factor + shift), and returns lanes of its sum.
  template <class Weights>
  static Vec raise(const float* scores, const Weights& weights, int from, int to, float factor, float shift) {
    Vec factors = all_of(factor), shifts = all_of(shift), even = all_of(0), odd = all_of(0);
    int at = from;
    for (; at + 32 <= to; at += 32) {
      Vec first = power(fma(load(scores + at), factors, shifts)), second = power(fma(load(scores + at + 16), factors, shifts));
      even += first;
      odd += second;
      weights.put_both(at, first, second);
    }
    if (at < to) {
      Vec last = power(fma(load(scores + at), factors, shifts));
      even += last;
      weights.put(at, last);
    }
    return even + odd;
  }

  static Vec power(Vec exponent) {
    if constexpr (kPair<T> == 2)
      return coarse_exp2(exponent);  // for bfloat16
    else
      return exp2(exponent);
  }

  void cap(float* scores, int from, int to) const {
    Vec inner = all_of(layer.scale / layer.soft_cap), outer = all_of(layer.soft_cap);
    for (int at = from; at < to; at += 16) store(scores + at, tanh(load(scores + at) * inner) * outer);
  }
};

}  // namespace inferplane::INFERPLANE_LEVEL
