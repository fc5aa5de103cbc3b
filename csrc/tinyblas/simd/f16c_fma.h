// FMA and F16C for the eight-lane tiers (amd_fma and later).
#pragma once

#include "avx_f32.h"

namespace ktlinear::tinyblas::KT_TIER {

KT_INLINE F32 fma(F32 a, F32 b, F32 c) { return _mm256_fmadd_ps(a, b, c); }
KT_INLINE F32 load_f16(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
KT_INLINE void store_f16(uint16_t* p, F32 v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}

}  // namespace ktlinear::tinyblas::KT_TIER
