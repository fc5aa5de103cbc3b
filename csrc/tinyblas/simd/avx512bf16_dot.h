// Products of bf16 pairs with vdpbf16ps, zmm: on Zen 4 one a cycle, as fmadd, with twice the products. Subnormal
// numbers count as 0.
#pragma once

#include "avx512.h"

#define KT_HAS_BF16_DOT

namespace ktlinear::tinyblas::KT_TIER {

// acc + the two products of each lane, added in fp32; a lane of a and b is a pair of bf16 numbers.
KT_INLINE F32 dot_bf16(F32 a, F32 b, F32 acc) {
  return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}

}  // namespace ktlinear::tinyblas::KT_TIER
