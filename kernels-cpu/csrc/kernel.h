// What every source in kernels/ includes first. Such a source is compiled once for each level of instructions, with
// INFERPLANE_LEVEL (avx2, avx512, avx512_vnni, avx512_bf16, amx) and INFERPLANE_LEVEL_NUMBER (isa.h) defined.
//
// Rules: everything lies in `namespace inferplane::INFERPLANE_LEVEL`; no containers, strings or streams of the standard
// library, whose inline functions the linker would keep in the form of one level for all of them.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "isa.h"
#include "pool.h"
#include "program.h"

#define INFERPLANE_HAS_AVX512 (INFERPLANE_LEVEL_NUMBER >= 2)
#define INFERPLANE_HAS_AVX512_VNNI (INFERPLANE_LEVEL_NUMBER >= 3)
#define INFERPLANE_HAS_AVX512_BF16 (INFERPLANE_LEVEL_NUMBER >= 4)
#define INFERPLANE_HAS_AMX (INFERPLANE_LEVEL_NUMBER >= 5)

#define INFERPLANE_JOIN_(a, b) a##_##b
#define INFERPLANE_JOIN(a, b) INFERPLANE_JOIN_(a, b)

// EXPORT(void, name)(int a, ...) { ... } is found from Python as `name` of this level. RECORDABLE(name) behind it
// (program.h) lets its calls enter recorded steps, and belongs to every op that decode steps call.
#define EXPORT(type, name) \
  extern "C" __attribute__((visibility("default"))) type INFERPLANE_JOIN(name, INFERPLANE_LEVEL)
