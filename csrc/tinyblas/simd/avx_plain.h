// Plain AVX (Sandy Bridge): no FMA, and half precision in integer arithmetic, since F16C is a feature of its own.
#pragma once

#include "avx_f32.h"

namespace ktlinear::tinyblas::KT_TIER {

KT_INLINE F32 fma(F32 a, F32 b, F32 c) { return _mm256_add_ps(_mm256_mul_ps(a, b), c); }
// As half_to_float in scalar.h: integers rebias normal numbers, a conversion makes the subnormal ones.
KT_INLINE __m128 half_quarter(__m128i h) {  // four halves, each in the low part of a 32-bit lane
  const __m128i magnitude = _mm_and_si128(h, _mm_set1_epi32(0x7FFF));
  const __m128i sign = _mm_slli_epi32(_mm_and_si128(h, _mm_set1_epi32(0x8000)), 16);
  const __m128i rebias = _mm_set1_epi32(0x38000000);
  const __m128i special = _mm_and_si128(_mm_cmpgt_epi32(magnitude, _mm_set1_epi32(0x7BFF)), rebias);
  const __m128i normal = _mm_add_epi32(_mm_add_epi32(_mm_slli_epi32(magnitude, 13), rebias), special);
  const __m128 subnormal = _mm_mul_ps(_mm_cvtepi32_ps(magnitude), _mm_set1_ps(0x1p-24f));
  const __m128 is_normal = _mm_castsi128_ps(_mm_cmpgt_epi32(magnitude, _mm_set1_epi32(0x03FF)));
  return _mm_or_ps(_mm_blendv_ps(subnormal, _mm_castsi128_ps(normal), is_normal), _mm_castsi128_ps(sign));
}
KT_INLINE F32 load_f16(const uint16_t* p) {
  const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), z = _mm_setzero_si128();
  return _mm256_insertf128_ps(_mm256_castps128_ps256(half_quarter(_mm_unpacklo_epi16(h, z))),
                              half_quarter(_mm_unpackhi_epi16(h, z)), 1);
}
KT_INLINE void store_f16(uint16_t* p, F32 v) {
  alignas(32) float f[8];
  _mm256_store_ps(f, v);
  KT_UNROLL for (int i = 0; i < 8; i++)
    p[i] = float_to_half(f[i]);
}

}  // namespace ktlinear::tinyblas::KT_TIER
