// Plain AVX (Sandy Bridge): no FMA, and half precision in integer arithmetic, since F16C is a feature of its own.
#pragma once

#include "avx_f32.h"

namespace ktlinear::tinyblas::KT_TIER {

KT_INLINE F32 fma(F32 a, F32 b, F32 c) { return _mm256_add_ps(_mm256_mul_ps(a, b), c); }
// As half_to_float in scalar.h: the exponent's bias is corrected by a multiplication.
KT_INLINE __m128 half_quarter(__m128i h) {  // four halves, each in the low part of a 32-bit lane
  const __m128i magnitude = _mm_slli_epi32(_mm_and_si128(h, _mm_set1_epi32(0x7FFF)), 13);
  const __m128i sign = _mm_slli_epi32(_mm_and_si128(h, _mm_set1_epi32(0x8000)), 16);
  const __m128 f = _mm_mul_ps(_mm_castsi128_ps(magnitude), _mm_set1_ps(0x1p112f));
  const __m128 special =
      _mm_and_ps(_mm_cmpge_ps(f, _mm_set1_ps(65536.f)), _mm_castsi128_ps(_mm_set1_epi32(0x7F800000)));
  return _mm_or_ps(_mm_or_ps(f, special), _mm_castsi128_ps(sign));
}
KT_INLINE F32 load_f16(const uint16_t* p) {
  const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), z = _mm_setzero_si128();
  return _mm256_insertf128_ps(_mm256_castps128_ps256(half_quarter(_mm_unpacklo_epi16(h, z))),
                              half_quarter(_mm_unpackhi_epi16(h, z)), 1);
}
KT_INLINE void store_f16(uint16_t* p, F32 v) {
  alignas(32) float f[8];
  _mm256_store_ps(f, v);
  KT_UNROLL for (int i = 0; i < 8; i++) p[i] = float_to_half(f[i]);
}

}  // namespace ktlinear::tinyblas::KT_TIER
