// Eight fp32 lanes, AVX: shared by every tier from amd_avx to amd_avxvnni. fma, and the half conversions, come from
// avx_plain.h or f16c_fma.h. See portable.h for what each name does.
#pragma once

#include <immintrin.h>

#include "../scalar.h"

namespace ktlinear::tinyblas::KT_TIER {

inline constexpr int kLanes = 8;
using F32 = __m256;

KT_INLINE F32 zero() { return _mm256_setzero_ps(); }
KT_INLINE F32 set1(float v) { return _mm256_set1_ps(v); }
KT_INLINE F32 load(const float* p) { return _mm256_loadu_ps(p); }
KT_INLINE void store(float* p, F32 v) { _mm256_storeu_ps(p, v); }
KT_INLINE __m256i first(int n) {
  alignas(32) static constexpr int32_t ones[16] = {-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0};
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(ones + 8 - n));
}
KT_INLINE void store_n(float* p, F32 v, int n) { _mm256_maskstore_ps(p, first(n), v); }
KT_INLINE F32 load_bf16(const uint16_t* p) {
  const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), z = _mm_setzero_si128();
  return _mm256_castsi256_ps(
      _mm256_insertf128_si256(_mm256_castsi128_si256(_mm_unpacklo_epi16(z, h)), _mm_unpackhi_epi16(z, h), 1));
}
KT_INLINE __m128i bf16_quarter(__m128 v) {  // four rounded values, each in the low half of a 32-bit lane
  const __m128i bits = _mm_castps_si128(v), odd = _mm_and_si128(_mm_srli_epi32(bits, 16), _mm_set1_epi32(1));
  const __m128i rounded = _mm_srli_epi32(_mm_add_epi32(bits, _mm_add_epi32(odd, _mm_set1_epi32(0x7FFF))), 16);
  const __m128i nan = _mm_or_si128(_mm_srli_epi32(bits, 16), _mm_set1_epi32(0x40));
  return _mm_blendv_epi8(rounded, nan, _mm_castps_si128(_mm_cmpunord_ps(v, v)));
}
KT_INLINE void store_bf16(uint16_t* p, F32 v) {
  const __m128i lo = bf16_quarter(_mm256_castps256_ps128(v)), hi = bf16_quarter(_mm256_extractf128_ps(v, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_packus_epi32(lo, hi));
}
KT_INLINE F32 add(F32 a, F32 b) { return _mm256_add_ps(a, b); }
KT_INLINE F32 sub(F32 a, F32 b) { return _mm256_sub_ps(a, b); }
KT_INLINE F32 mul(F32 a, F32 b) { return _mm256_mul_ps(a, b); }
KT_INLINE F32 sqrt_of(F32 v) { return _mm256_sqrt_ps(v); }
KT_INLINE __m128 quarter_sum(F32 v) { return _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1)); }
// 4x4 transposes inside the 128-bit halves, then the halves.
KT_INLINE void transpose(F32 (&r)[8]) {
  __m256 t[8];
  KT_UNROLL for (int i = 0; i < 8; i += 4) {
    const __m256 a = _mm256_unpacklo_ps(r[i], r[i + 1]), b = _mm256_unpackhi_ps(r[i], r[i + 1]);
    const __m256 c = _mm256_unpacklo_ps(r[i + 2], r[i + 3]), d = _mm256_unpackhi_ps(r[i + 2], r[i + 3]);
    t[i] = _mm256_shuffle_ps(a, c, 0x44);
    t[i + 1] = _mm256_shuffle_ps(a, c, 0xEE);
    t[i + 2] = _mm256_shuffle_ps(b, d, 0x44);
    t[i + 3] = _mm256_shuffle_ps(b, d, 0xEE);
  }
  KT_UNROLL for (int j = 0; j < 4; j++) {
    r[j] = _mm256_permute2f128_ps(t[j], t[4 + j], 0x20);
    r[4 + j] = _mm256_permute2f128_ps(t[j], t[4 + j], 0x31);
  }
}

}  // namespace ktlinear::tinyblas::KT_TIER

#include "x86_sum.h"
