// Integers for AVX2 and AVX-VNNI. See portable.h for what each name does.
#pragma once

#include "f16c_fma.h"

namespace ktlinear::tinyblas::KT_TIER {

using I32 = __m256i;

KT_INLINE I32 load_i(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
KT_INLINE void store_i(void* p, I32 v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }
KT_INLINE I32 splat_i32(int32_t v) { return _mm256_set1_epi32(v); }
KT_INLINE I32 splat_i8(uint8_t v) { return _mm256_set1_epi8(static_cast<char>(v)); }
KT_INLINE I32 band(I32 a, I32 b) { return _mm256_and_si256(a, b); }
KT_INLINE I32 bxor(I32 a, I32 b) { return _mm256_xor_si256(a, b); }
template <int N>
KT_INLINE I32 shift_right_16(I32 v) {
  return _mm256_srli_epi16(v, N);
}
template <int N>
KT_INLINE I32 shift_left_16(I32 v) {
  return _mm256_slli_epi16(v, N);
}
template <int N>
KT_INLINE I32 shift_right_32(I32 v) {
  return _mm256_srli_epi32(v, N);
}
template <int N>
KT_INLINE I32 shift_left_32(I32 v) {
  return _mm256_slli_epi32(v, N);
}
KT_INLINE I32 bor(I32 a, I32 b) { return _mm256_or_si256(a, b); }
KT_INLINE I32 and_or(I32 a, I32 b, I32 c) { return bor(band(a, b), c); }
KT_INLINE I32 table16(const uint8_t* t) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(t)));
}
KT_INLINE I32 lookup16(I32 table, I32 index) { return _mm256_shuffle_epi8(table, index); }
KT_INLINE I32 load_u8(const uint8_t* p) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
KT_INLINE I32 load_s8(const uint8_t* p) {
  return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
KT_INLINE I32 shift_right_32(I32 v, int n) { return _mm256_srl_epi32(v, _mm_cvtsi32_si128(n)); }
KT_INLINE I32 add_i16(I32 a, I32 b) { return _mm256_add_epi16(a, b); }
KT_INLINE I32 mul_low_16(I32 a, I32 b) { return _mm256_mullo_epi16(a, b); }
KT_INLINE F32 to_f32(I32 v) { return _mm256_cvtepi32_ps(v); }
template <int J>
KT_INLINE I32 byte(I32 v) {
  return _mm256_and_si256(_mm256_srli_epi32(v, 8 * J), _mm256_set1_epi32(255));
}

KT_INLINE void store_low_16(uint8_t* p, I32 v) {
  const __m256i low = _mm256_and_si256(v, _mm256_set1_epi32(0xFFFF));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1)));
}
KT_INLINE void store_low_8(uint8_t* p, I32 v) {
  const __m256i low = _mm256_and_si256(v, _mm256_set1_epi32(0xFF));
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(words, words));
}
KT_INLINE void store_bytes(uint8_t* p, I32 v) {
  const __m256i columns =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  const __m256i pairs =
      _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(v, columns), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  KT_UNROLL for (int i = 0; i < 2; i++) {
    const __m128i two = i == 0 ? _mm256_castsi256_si128(pairs) : _mm256_extracti128_si256(pairs, 1);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p + i * 32), two);
    _mm_storeh_pd(reinterpret_cast<double*>(p + i * 32 + 16), _mm_castsi128_pd(two));
  }
}
// Row 4q + r to half q of vector r; then 4x4 transposes inside the halves.
KT_INLINE void load_words(const uint8_t* p, int64_t stride, I32 (&w)[4]) {
  __m256i a[4];
  KT_UNROLL for (int r = 0; r < 4; r++) {
    const uint8_t* row = p + r * stride;
    a[r] = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row))),
                                   _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + 4 * stride)), 1);
  }
  const __m256i t0 = _mm256_unpacklo_epi32(a[0], a[1]), t1 = _mm256_unpackhi_epi32(a[0], a[1]);
  const __m256i t2 = _mm256_unpacklo_epi32(a[2], a[3]), t3 = _mm256_unpackhi_epi32(a[2], a[3]);
  w[0] = _mm256_unpacklo_epi64(t0, t2), w[1] = _mm256_unpackhi_epi64(t0, t2);
  w[2] = _mm256_unpacklo_epi64(t1, t3), w[3] = _mm256_unpackhi_epi64(t1, t3);
}

KT_INLINE I32 greater_i32(I32 a, I32 b) { return _mm256_cmpgt_epi32(a, b); }

// For the quantization of activations.
KT_INLINE F32 as_f32(I32 v) { return _mm256_castsi256_ps(v); }
KT_INLINE I32 as_i32(F32 v) { return _mm256_castps_si256(v); }
KT_INLINE I32 max_i32(I32 a, I32 b) { return _mm256_max_epi32(a, b); }
KT_INLINE I32 add_i32(I32 a, I32 b) { return _mm256_add_epi32(a, b); }
KT_INLINE int32_t max_lane(I32 v) {
  __m128i q = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  q = _mm_max_epi32(q, _mm_shuffle_epi32(q, 0x4E));
  return _mm_cvtsi128_si32(_mm_max_epi32(q, _mm_shuffle_epi32(q, 0xB1)));
}
KT_INLINE int32_t sum_lanes(I32 v) {
  __m128i q = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  q = _mm_add_epi32(q, _mm_shuffle_epi32(q, 0x4E));
  return _mm_cvtsi128_si32(_mm_add_epi32(q, _mm_shuffle_epi32(q, 0xB1)));
}
KT_INLINE I32 round_i32(F32 v) { return _mm256_cvtps_epi32(v); }
KT_INLINE void store_i8(int8_t* p, I32 v) {
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
}

}  // namespace ktlinear::tinyblas::KT_TIER
