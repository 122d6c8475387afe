// What this machine can do at most, to measure kernels by: benchmarks/cpu/kernels.py.
#include "amx.h"
#include "vec.h"

namespace inferplane::INFERPLANE_LEVEL {
namespace {

constexpr int64_t kBytesPerTask = 1 << 18;
// Of dependent products: more than the units need, and no more than there are registers for.
constexpr int kChains = INFERPLANE_HAS_AVX512 ? 12 : 6;

}  // namespace
}  // namespace inferplane::INFERPLANE_LEVEL

// Reads memory once, with all threads. num_bytes is a multiple of 256. Returns something of all of it.
EXPORT(float, read_memory)(const float* memory, int64_t num_bytes) {
  using namespace inferplane;
  using namespace inferplane::INFERPLANE_LEVEL;
  float result = 0;
  parallel(int((num_bytes + kBytesPerTask - 1) / kBytesPerTask), [&](int task, int) {
    int64_t end = (task + 1) * kBytesPerTask;
    if (end > num_bytes) end = num_bytes;
    Vec highest[4] = {all_of(0), all_of(0), all_of(0), all_of(0)};
    for (int64_t at = task * kBytesPerTask / 4; at < end / 4; at += 64)
      for (int i = 0; i < 4; ++i) highest[i] = max(highest[i], load(memory + at + i * 16));
    float seen = max_of(max(max(highest[0], highest[1]), max(highest[2], highest[3])));
    if (seen > 1e38f) result = seen;
  });
  return result;
}

// Multiplies what lies in registers or tiles, with all threads; returns how many floating-point operations those were.
EXPORT(double, multiply_registers)(int64_t num_tasks, int64_t rounds_per_task) {
  using namespace inferplane;
  using namespace inferplane::INFERPLANE_LEVEL;
  parallel(int(num_tasks), [&](int, int) {
#if INFERPLANE_HAS_AMX
    Tiles tiles;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    // numbers as weights have them: products of zeros take less power, and run faster than any that matter
    alignas(64) bf16 numbers[16 * 32];
    uint32_t state = 1;
    for (bf16& number : numbers) {
      state = state * 1664525u + 1013904223u;
      number = bf16(0x3c00 | (state >> 16 & 0x83ff));  // of either sign, 0.0078 to 2
    }
    _tile_loadd(4, numbers, 64);
    _tile_loadd(5, numbers, 64);
    _tile_loadd(6, numbers, 64);
    _tile_loadd(7, numbers, 64);
    for (int64_t round = 0; round < rounds_per_task; ++round) {
      _tile_dpbf16ps(0, 6, 4);
      _tile_dpbf16ps(1, 6, 5);
      _tile_dpbf16ps(2, 7, 4);
      _tile_dpbf16ps(3, 7, 5);
      asm volatile("" ::: "memory");
    }
#else
    Vec sums[kChains], factor = all_of(0.5f);
    for (auto& sum : sums) sum = all_of(1);
    // told nothing of memory: the compiler would keep the sums there, and each round would wait for its stores
    for (int64_t round = 0; round < rounds_per_task; ++round)
#pragma GCC unroll 12
      for (int i = 0; i < kChains; ++i)
#if INFERPLANE_HAS_AVX512_BF16
        sums[i].all = _mm512_dpbf16_ps(sums[i].all, (__m512bh)_mm512_castps_si512(factor.all),
                                       (__m512bh)_mm512_castps_si512(factor.all));
#else
        sums[i] = fma(sums[i], factor, factor);
#endif
    for (auto& sum : sums) asm volatile("" ::"x"(sum_of(sum)));
#endif
  });
#if INFERPLANE_HAS_AMX
  constexpr double kOperations = 4 * 2 * 16 * 16 * 32;
#elif INFERPLANE_HAS_AVX512_BF16
  constexpr double kOperations = kChains * 2 * 32;
#else
  constexpr double kOperations = kChains * 2 * 16;
#endif
  return kOperations * double(num_tasks) * double(rounds_per_task);
}
