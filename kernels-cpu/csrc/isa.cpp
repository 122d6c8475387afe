#include "isa.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace inferplane {
namespace {

constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
constexpr int kTileData = 18;               // XFEATURE_XTILEDATA

// Whether the system grants the tiles' 8 KB of state. A grant is for the whole process, later threads included.
bool amx_is_granted() { return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0; }

bool has_amx() {
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25;
  constexpr unsigned kAll = kBf16 | kTile | kInt8;
  return (edx & kAll) == kAll && amx_is_granted();
}

bool has_avx512_bf16() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax & (1u << 5));
}

Level find_level() {
  __builtin_cpu_init();  // its answers include what the system saves of the registers
  auto has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  if (!has_avx2) return kNone;
  if (!(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")))
    return kAvx2;
  if (!__builtin_cpu_supports("avx512vnni")) return kAvx512;
  if (!has_avx512_bf16()) return kAvx512Vnni;
  return has_amx() && __builtin_cpu_supports("avx512vbmi") ? kAmx : kAvx512Bf16;
}

}  // namespace

Level highest_level() {
  static const Level level = find_level();
  return level;
}

}  // namespace inferplane

extern "C" __attribute__((visibility("default"))) int inferplane_highest_level() {
  return inferplane::highest_level();
}
