// AVX2 without VNNI: the instructions that maddubs_dot.h is written on.
#pragma once

#include "avx2_int.h"

namespace ktlinear::tinyblas::KT_TIER {

KT_INLINE I32 maddubs(I32 u, I32 s) { return _mm256_maddubs_epi16(u, s); }
KT_INLINE I32 madd(I32 a, I32 b) { return _mm256_madd_epi16(a, b); }
KT_INLINE void opaque(I32& v) { asm volatile("" : "+x"(v)); }

}  // namespace ktlinear::tinyblas::KT_TIER

#include "maddubs_dot.h"
