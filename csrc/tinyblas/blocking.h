// Block sizes and switch points, one row per tier, filled from measurements (`python -m benchmarks`); Arm's
// by counting registers, for want of a machine.
#pragma once

#include "scalar.h"

namespace ktlinear::tinyblas::KT_TIER {

struct Blocking {
  const char* tier;
  // fp32 micro-kernel: mr rows of x by nv vectors of W's rows, kc steps of K per packed panel, panels of W per block.
  //   registers: mr * nv sums + nv weights + 1 broadcast
  int mr, nv, kc, block_panels;
  // Small M, float weights: dot products of dot_mr rows of x with 4 rows of W; used up to M = dot_max.
  //   registers: 4 * dot_mr sums + 4 weights + 1 x
  int dot_mr, dot_max;
  // int8 micro-kernel: int_mr rows of x by int_panels panels of 16 rows of W; int_kc, int_block_panels as above.
  //   registers: int_mr * int_panels * (16 / lanes) int32 sums, and as many fp32 sums where c_in_registers
  int int_mr, int_panels, int_kc, int_block_panels;
  bool c_in_registers;
  // Small M, quantized weights decoded in registers: used up to M = direct_max, in tiles of at most 8 rows of x.
  int direct_max;
};

inline constexpr Blocking kBlockings[] = {
    // tier           mr nv   kc  bp  dot_mr max   imr ip   ikc ibp  c_in_regs direct
    {"unsupported", 4, 2, 256, 4, 3, 4, 0, 0, 0, 0, false, 0},
    // 32 registers of four lanes: 8 x 12 sums; int8, 6 x 16 sums, and one row less where a product takes three
    // instructions
    {"arm80", 8, 3, 256, 4, 3, 8, 5, 1, 512, 4, false, 4},
    {"arm82", 8, 3, 256, 4, 3, 8, 6, 1, 512, 4, false, 4},
    {"arm86", 8, 3, 256, 4, 3, 8, 6, 1, 512, 4, false, 4},
    {"amd_avx", 4, 2, 256, 4, 3, 8, 0, 0, 0, 0, false, 0},
    {"amd_fma", 6, 2, 384, 4, 3, 8, 0, 0, 0, 0, false, 0},
    {"amd_avx2", 6, 2, 384, 4, 3, 8, 6, 1, 1024, 4, false, 4},
    {"amd_avxvnni", 6, 2, 384, 4, 3, 8, 6, 1, 1024, 4, false, 4},
    {"amd_avx512f", 8, 3, 256, 4, 6, 32, 7, 2, 512, 4, true, 8},
    {"amd_avx512vnni", 8, 3, 256, 4, 6, 32, 7, 2, 512, 4, true, 16},
    {"amd_zen4", 8, 3, 256, 4, 6, 32, 0, 0, 0, 0, false, 0},
};

#define KT_STRINGIZE_(x) #x
#define KT_STRINGIZE(x) KT_STRINGIZE_(x)

constexpr Blocking this_tier() {
  for (const Blocking& b : kBlockings) {
    const char *p = b.tier, *q = KT_STRINGIZE(KT_TIER);
    while (*p && *p == *q) p++, q++;
    if (*p == *q) return b;
  }
  return {};
}
inline constexpr Blocking kBlocking = this_tier();
static_assert(kBlocking.mr > 0, "this tier has no row in the table of block sizes");

}  // namespace ktlinear::tinyblas::KT_TIER
