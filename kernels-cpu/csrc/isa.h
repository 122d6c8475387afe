// Which instructions this machine lets a process use.
#pragma once

namespace inferplane {

// Levels by rising ability; each has all of the ones before it.
enum Level {
  kNone = 0,
  kAvx2 = 1,        // AVX2, FMA, F16C
  kAvx512 = 2,      // AVX-512 F, BW, VL, DQ
  kAvx512Vnni = 3,  // and VNNI
  kAvx512Bf16 = 4,  // and BF16
  kAmx = 5,         // and VBMI, and AMX tiles of bfloat16 and int8, which the system has granted
};

// The highest level of this machine. Asks the system for AMX, once.
Level highest_level();

}  // namespace inferplane
