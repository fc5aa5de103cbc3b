// AVX-512 without VNNI: the instructions that maddubs_dot.h is written on.
#pragma once

#include "avx512.h"

namespace ktlinear::tinyblas::KT_TIER {

KT_INLINE I32 maddubs(I32 u, I32 s) { return _mm512_maddubs_epi16(u, s); }
KT_INLINE I32 madd(I32 a, I32 b) { return _mm512_madd_epi16(a, b); }
KT_INLINE void opaque(I32& v) { asm volatile("" : "+v"(v)); }

}  // namespace ktlinear::tinyblas::KT_TIER

#include "maddubs_dot.h"
