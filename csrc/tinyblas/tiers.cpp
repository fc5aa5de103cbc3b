// The only file besides the kernels that is compiled with a tier's own flags: in a single-tier build they are what
// selects the tier in tinyblas_cpu.h. It holds a table and no inline function that the linker could pick for another
// file.
#include "tiers.h"

#include "tinyblas_cpu.h"

namespace ktlinear::tinyblas {

const Tier* tiers(int* count) {
  static constexpr Tier kTiers[] = {KT_TIERS};
  *count = static_cast<int>(sizeof(kTiers) / sizeof(kTiers[0]));
  return kTiers;
}

}  // namespace ktlinear::tinyblas
