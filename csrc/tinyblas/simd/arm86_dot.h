// int8 products with usdot, which takes the codes as they are: unsigned.
#pragma once

#include "neon.h"

namespace ktlinear::tinyblas::KT_TIER {

inline constexpr bool kUnsignedCodes = true;

KT_INLINE I32 dot(I32 acc, I32 w, I32 x) { return vusdotq_s32(acc, vreinterpretq_u8_s32(w), vreinterpretq_s8_s32(x)); }

}  // namespace ktlinear::tinyblas::KT_TIER

#include "neon_dot.h"
