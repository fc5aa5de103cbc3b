// int8 products with sdot.
#pragma once

#include "neon.h"

namespace ktlinear::tinyblas::KT_TIER {

inline constexpr bool kUnsignedCodes = false;

KT_INLINE I32 dot(I32 acc, I32 w, I32 x) { return vdotq_s32(acc, vreinterpretq_s8_s32(w), vreinterpretq_s8_s32(x)); }

}  // namespace ktlinear::tinyblas::KT_TIER

#include "neon_dot.h"
