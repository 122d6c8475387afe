// One token of each row of logits, drawn by temperature, top_k, top_p and min_p as a race (draw_token of inferplane.api):
// a block of tokens wins first, then a token of the block.
#include <cmath>

#include "vec.h"

namespace inferplane::INFERPLANE_LEVEL {
namespace {

constexpr int64_t kBlock = 256;                      // tokens that race together
constexpr uint32_t kFirstBlock = 1u << 31;           // index of the random number of the first block
constexpr float kFloors[] = {0x1p-6f, 0x1p-14f, 0}; // where to look for the smallest weight that is kept
constexpr int kShift = 17;                           // weights are at most 1 and lie in bins by their bits from here on
constexpr int kBins = (0x3f800000 >> kShift) + 1;

uint32_t mix(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x21f0aaadu;
  x = (x ^ (x >> 15)) * 0xd35a2d97u;
  return x ^ (x >> 15);
}

// Exponentially distributed with mean 1, a function of key and index.
float exponential(uint32_t low, uint32_t high, uint32_t index) {
  float uniform = (float(mix(mix(index ^ low) ^ high)) + 0.5f) * 0x1p-32f;
  constexpr float kLargest = 1.0f - 0x1p-24f;
  return -log1pf(-(uniform < kLargest ? uniform : kLargest));
}

int bin_of(float weight) {
  int32_t bits;
  std::memcpy(&bits, &weight, 4);
  return bits >> kShift;
}

// Makes of a heap, whose smallest is on top, one again after values[root] was changed.
void sift(float* values, int64_t root, int64_t end) {
  float value = values[root];
  for (int64_t child; (child = 2 * root + 1) < end; root = child) {
    if (child + 1 < end && values[child + 1] < values[child]) ++child;
    if (values[child] >= value) break;
    values[root] = values[child];
  }
  values[root] = value;
}

void sort_down(float* values, int64_t n) {
  for (int64_t root = n / 2 - 1; root >= 0; --root) sift(values, root, n);
  for (int64_t end = n - 1; end > 0; --end) {
    float least = values[0];
    values[0] = values[end];
    values[end] = least;
    sift(values, 0, end);
  }
}

// Weights from some floor on, sorted into bins.
struct Largest {
  float* weights;  // n of them
  float* members;  // room for as many
  int32_t* counts;
  double* masses;
  int64_t n = 0;

  void take(const float* row, int64_t vocab_size, float floor) {
    n = 0;
    for (int64_t i = 0; i < vocab_size; i += 16) {
      if (max_of(load(row + i)) < floor) continue;
      for (int64_t j = i; j < i + 16; ++j)
        if (row[j] >= floor) weights[n++] = row[j];
    }
    std::memset(counts, 0, kBins * sizeof(*counts));
    std::memset(masses, 0, kBins * sizeof(*masses));
    for (int64_t i = 0; i < n; ++i) {
      int bin = bin_of(weights[i]);
      ++counts[bin];
      masses[bin] += double(weights[i]);
    }
  }

  // From the largest down to `floor`: the weight at which is_reached(count, mass) first holds, or a negative number; and
  // the mass up to there.
  template <class IsReached>
  float find(float floor, const IsReached& is_reached, double* mass) {
    int64_t count = 0;
    *mass = 0;
    for (int bin = kBins - 1; bin >= bin_of(floor); --bin) {
      if (counts[bin] == 0) continue;
      if (bin > bin_of(floor) && !is_reached(count + counts[bin], *mass + masses[bin])) {
        count += counts[bin];
        *mass += masses[bin];
        continue;
      }
      int64_t num_members = 0;
      for (int64_t i = 0; i < n; ++i)
        if (bin_of(weights[i]) == bin && weights[i] >= floor) members[num_members++] = weights[i];
      sort_down(members, num_members);
      for (int64_t i = 0; i < num_members;) {
        float weight = members[i];
        for (; i < num_members && members[i] == weight; ++i) {  // equal ones stay together
          ++count;
          *mass += double(weight);
        }
        if (is_reached(count, *mass)) return weight;
      }
    }
    return -1;
  }
};

// The smallest weight that top_k and top_p leave in the race. `total`: the mass of all.
float smallest_kept(Largest& largest, const float* row, int64_t vocab_size, int64_t top_k, float top_p, double total) {
  if (top_k >= vocab_size && top_p >= 1) return 0;
  for (float floor : kFloors) {
    largest.take(row, vocab_size, floor);
    float kept = 0;
    double mass = total, mass_there;
    if (top_k < vocab_size) {
      kept = largest.find(floor, [&](int64_t count, double) { return count >= top_k; }, &mass);
      if (kept < 0) continue;
    }
    if (top_p >= 1) return kept;
    double target = double(top_p) * mass * (1 - 1e-6);  // as exact as the weights are
    float end = largest.find(kept > floor ? kept : floor, [&](int64_t, double mass) { return mass >= target; }, &mass_there);
    if (end >= 0) return end;
    if (top_k < vocab_size) return kept;
  }
  return 0;
}

// The token that wins, or -1. weights: [vocab_size], followed by zeros up to a whole block.
int64_t race(const float* weights, int64_t vocab_size, uint32_t low, uint32_t high) {
  float best_time = INFINITY;
  int64_t best = -1;
  for (int64_t start = 0; start < vocab_size; start += kBlock) {
    Vec sum = all_of(0);
    for (int64_t i = start; i < start + kBlock; i += 16) sum += load(weights + i);
    float rate = sum_of(sum);
    if (!(rate > 0)) continue;
    float time = exponential(low, high, kFirstBlock + uint32_t(start / kBlock)) / rate;
    if (time < best_time || best < 0) best_time = time, best = start;
  }
  if (best < 0) return -1;
  int64_t token = -1;
  for (int64_t i = best; i < best + kBlock && i < vocab_size; ++i) {
    if (!(weights[i] > 0)) continue;
    float time = exponential(low, high, uint32_t(i)) / weights[i];
    if (token < 0 || time < best_time) best_time = time, token = i;
  }
  return token;
}

struct Settings {
  float temperature, top_p, min_p;
  int64_t top_k;
  uint32_t low, high;
};

template <class T>
int64_t draw(const T* logits, int64_t vocab_size, const Settings& settings) {
  int64_t padded = (vocab_size + kBlock - 1) / kBlock * kBlock;
  auto* weights = static_cast<float*>(
      thread_scratch(size_t(3 * padded) * sizeof(float) + kBins * (sizeof(int32_t) + sizeof(double))));
  Largest largest;
  largest.weights = weights + padded;
  largest.members = weights + 2 * padded;
  largest.masses = reinterpret_cast<double*>(weights + 3 * padded);
  largest.counts = reinterpret_cast<int32_t*>(largest.masses + kBins);
  Vec highest = all_of(-INFINITY);
  int64_t i = 0;
  for (; i + 16 <= vocab_size; i += 16) {
    Vec part = load(logits + i);
    highest = max(highest, part);
    store(weights + i, part);
  }
  if (i < vocab_size) store(weights + i, load(logits + i, int(vocab_size - i)), int(vocab_size - i));
  for (i = vocab_size; i < padded; ++i) weights[i] = -INFINITY;
  if (vocab_size % 16) highest = max(highest, load(weights + vocab_size / 16 * 16));
  float factor = kLog2E / settings.temperature;
  Vec scale = all_of(factor), offset = all_of(-max_of(highest) * factor), sum = all_of(0);
  for (i = 0; i < padded; i += 16) {
    Vec weight = exp2(fma(load(weights + i), scale, offset));
    store(weights + i, weight);
    sum += weight;
  }
  float total = sum_of(sum);
  if (!(total >= 0.5f && total < INFINITY)) return -1;  // the largest weight is 1, unless something is no number
  float floor = smallest_kept(largest, weights, vocab_size, settings.top_k, settings.top_p, double(total));
  if (settings.min_p > floor) floor = settings.min_p;
  if (floor > 0)
    for (i = 0; i < padded; ++i) weights[i] = weights[i] >= floor ? weights[i] : 0;
  return race(weights, vocab_size, settings.low, settings.high);
}

template <class T>
void draw_rows(const T* logits, int64_t* out, int64_t num_rows, int64_t vocab_size, int64_t stride, const float* floats,
               const int32_t* ints, bool has_top_k) {
  parallel(int(num_rows), [&](int row, int) {
    Settings settings{floats[row],
                      floats[num_rows + row],
                      floats[2 * num_rows + row],
                      has_top_k ? ints[row] : vocab_size,
                      uint32_t(ints[num_rows + row]),
                      uint32_t(ints[2 * num_rows + row])};
    int64_t token = draw(logits + row * stride, vocab_size, settings);
    out[row] = token < 0 ? 0 : token;
    out[num_rows + row] = token < 0;
  });
}

}  // namespace
}  // namespace inferplane::INFERPLANE_LEVEL

// logits: [num_rows, vocab_size], rows stride elements apart; floats: [3, num_rows], temperature, top_p, min_p;
// ints: [3, num_rows], top_k (where has_top_k) and the halves of the key; out: [2, num_rows], tokens and 0, or 0 and 1 for none.
EXPORT(void, draw_token_float32)
(const float* logits, int64_t* out, int64_t num_rows, int64_t vocab_size, int64_t stride, const float* floats,
 const int32_t* ints, bool has_top_k) {
  inferplane::INFERPLANE_LEVEL::draw_rows(logits, out, num_rows, vocab_size, stride, floats, ints, has_top_k);
}

EXPORT(void, draw_token_bfloat16)
(const uint16_t* logits, int64_t* out, int64_t num_rows, int64_t vocab_size, int64_t stride, const float* floats,
 const int32_t* ints, bool has_top_k) {
  inferplane::INFERPLANE_LEVEL::draw_rows(logits, out, num_rows, vocab_size, stride, floats, ints, has_top_k);
}

EXPORT(void, draw_token_float16)
(const inferplane::INFERPLANE_LEVEL::half* logits, int64_t* out, int64_t num_rows, int64_t vocab_size, int64_t stride,
 const float* floats, const int32_t* ints, bool has_top_k) {
  inferplane::INFERPLANE_LEVEL::draw_rows(logits, out, num_rows, vocab_size, stride, floats, ints, has_top_k);
}
