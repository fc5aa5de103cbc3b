// int8 products of ARMv8.0: smull, smlal2, sadalp.
#pragma once

#include "neon.h"

namespace ktlinear::tinyblas::KT_TIER {

inline constexpr bool kUnsignedCodes = false;

// With the first two bytes of each lane in the low half and the last two in the high one, both halves' products belong
// to the same lanes: |code * q| <= 128 * 127, and two fit an int16. The shuffle of w serves all rows of x, that of x
// all vectors of w.
KT_INLINE I32 dot(I32 acc, I32 w, I32 x) {
  alignas(16) static constexpr uint8_t halves[16] = {0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15};
  const I32 order = load_i(halves);
  const int8x16_t a = vreinterpretq_s8_s32(lookup16(w, order)), b = vreinterpretq_s8_s32(lookup16(x, order));
  return vpadalq_s16(acc, vmlal_high_s8(vmull_s8(vget_low_s8(a), vget_low_s8(b)), a, b));
}

}  // namespace ktlinear::tinyblas::KT_TIER

#include "neon_dot.h"
