// AVX-512 F, BW, DQ, VL: sixteen lanes, 32 registers. See portable.h for what each name does.
#pragma once

#include "../scalar.h"

// GCC 12 takes the deliberately undefined pass-through operand of its own intrinsics for a bug of ours (GCC PR 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

namespace ktlinear::tinyblas::KT_TIER {

inline constexpr int kLanes = 16;
using F32 = __m512;
using I32 = __m512i;

KT_INLINE F32 zero() { return _mm512_setzero_ps(); }
KT_INLINE F32 set1(float v) { return _mm512_set1_ps(v); }
KT_INLINE F32 load(const float* p) { return _mm512_loadu_ps(p); }
KT_INLINE void store(float* p, F32 v) { _mm512_storeu_ps(p, v); }
KT_INLINE __mmask16 first(int n) { return static_cast<__mmask16>((1u << n) - 1); }
KT_INLINE void store_n(float* p, F32 v, int n) { _mm512_mask_storeu_ps(p, first(n), v); }
KT_INLINE F32 load_f16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
KT_INLINE F32 load_bf16(const uint16_t* p) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
}
KT_INLINE void store_f16(uint16_t* p, F32 v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
KT_INLINE void store_bf16(uint16_t* p, F32 v) {
  const __m512i bits = _mm512_castps_si512(v),
                odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded =
      _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF))), 16);
  const __m512i nan = _mm512_or_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
  const __m512i out = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), nan);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(out));
}
KT_INLINE F32 add(F32 a, F32 b) { return _mm512_add_ps(a, b); }
KT_INLINE F32 sub(F32 a, F32 b) { return _mm512_sub_ps(a, b); }
KT_INLINE F32 mul(F32 a, F32 b) { return _mm512_mul_ps(a, b); }
KT_INLINE F32 fma(F32 a, F32 b, F32 c) { return _mm512_fmadd_ps(a, b, c); }
KT_INLINE F32 sqrt_of(F32 v) { return _mm512_sqrt_ps(v); }
KT_INLINE __m128 quarter_sum(F32 v) {
  const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  return _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
}
// 4x4 transposes inside the 128-bit quarters, then the quarters themselves: 64 shuffles for 256 elements.
KT_INLINE void transpose(F32 (&r)[16]) {
  __m512 t[16];
  KT_UNROLL for (int i = 0; i < 16; i += 4) {
    const __m512 a = _mm512_unpacklo_ps(r[i], r[i + 1]), b = _mm512_unpackhi_ps(r[i], r[i + 1]);
    const __m512 c = _mm512_unpacklo_ps(r[i + 2], r[i + 3]), d = _mm512_unpackhi_ps(r[i + 2], r[i + 3]);
    t[i] = _mm512_shuffle_ps(a, c, 0x44);
    t[i + 1] = _mm512_shuffle_ps(a, c, 0xEE);
    t[i + 2] = _mm512_shuffle_ps(b, d, 0x44);
    t[i + 3] = _mm512_shuffle_ps(b, d, 0xEE);
  }
  // t[4i + j] holds, in quarter q, column 4q + j of rows 4i..4i+3.
  KT_UNROLL for (int j = 0; j < 4; j++) {
    const __m512 a = _mm512_shuffle_f32x4(t[j], t[4 + j], 0x88), b = _mm512_shuffle_f32x4(t[j], t[4 + j], 0xDD);
    const __m512 c = _mm512_shuffle_f32x4(t[8 + j], t[12 + j], 0x88),
                 d = _mm512_shuffle_f32x4(t[8 + j], t[12 + j], 0xDD);
    r[j] = _mm512_shuffle_f32x4(a, c, 0x88);
    r[4 + j] = _mm512_shuffle_f32x4(b, d, 0x88);
    r[8 + j] = _mm512_shuffle_f32x4(a, c, 0xDD);
    r[12 + j] = _mm512_shuffle_f32x4(b, d, 0xDD);
  }
}

KT_INLINE I32 load_i(const void* p) { return _mm512_loadu_si512(p); }
KT_INLINE void store_i(void* p, I32 v) { _mm512_storeu_si512(p, v); }
KT_INLINE I32 splat_i32(int32_t v) { return _mm512_set1_epi32(v); }
KT_INLINE I32 splat_i8(uint8_t v) { return _mm512_set1_epi8(static_cast<char>(v)); }
KT_INLINE I32 band(I32 a, I32 b) { return _mm512_and_si512(a, b); }
KT_INLINE I32 bxor(I32 a, I32 b) { return _mm512_xor_si512(a, b); }
template <int N>
KT_INLINE I32 shift_right_16(I32 v) {
  return _mm512_srli_epi16(v, N);
}
template <int N>
KT_INLINE I32 shift_left_16(I32 v) {
  return _mm512_slli_epi16(v, N);
}
template <int N>
KT_INLINE I32 shift_right_32(I32 v) {
  return _mm512_srli_epi32(v, N);
}
template <int N>
KT_INLINE I32 shift_left_32(I32 v) {
  return _mm512_slli_epi32(v, N);
}
KT_INLINE I32 bor(I32 a, I32 b) { return _mm512_or_si512(a, b); }
KT_INLINE I32 and_or(I32 a, I32 b, I32 c) { return _mm512_ternarylogic_epi32(a, b, c, 0xEA); }
KT_INLINE I32 table16(const uint8_t* t) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(t)));
}
KT_INLINE I32 lookup16(I32 table, I32 index) { return _mm512_shuffle_epi8(table, index); }
KT_INLINE I32 load_u8(const uint8_t* p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
KT_INLINE I32 load_s8(const uint8_t* p) {
  return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
KT_INLINE I32 shift_right_32(I32 v, int n) { return _mm512_srl_epi32(v, _mm_cvtsi32_si128(n)); }
KT_INLINE I32 add_i16(I32 a, I32 b) { return _mm512_add_epi16(a, b); }
KT_INLINE I32 mul_low_16(I32 a, I32 b) { return _mm512_mullo_epi16(a, b); }
KT_INLINE F32 to_f32(I32 v) { return _mm512_cvtepi32_ps(v); }
template <int J>
KT_INLINE I32 byte(I32 v) {
  return _mm512_and_si512(_mm512_srli_epi32(v, 8 * J), _mm512_set1_epi32(255));
}

KT_INLINE void store_low_8(uint8_t* p, I32 v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(v));
}
KT_INLINE void store_low_16(uint8_t* p, I32 v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(v));
}
KT_INLINE void store_bytes(uint8_t* p, I32 v) {
  const __m512i columns = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  _mm512_storeu_si512(p, _mm512_permutexvar_epi32(order, _mm512_shuffle_epi8(v, columns)));
}
// Row 4q + r to quarter q of vector r; then 4x4 transposes inside the quarters. A masked broadcast is a load and a
// blend, which any port takes; an insertion would compete with the transposes for the shuffles'.
KT_INLINE void load_words(const uint8_t* p, int64_t stride, I32 (&w)[4]) {
  __m512i a[4];
  KT_UNROLL for (int r = 0; r < 4; r++) {
    const uint8_t* row = p + r * stride;
    auto quarter = [&](int q) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + 4 * q * stride)); };
    a[r] = _mm512_castsi128_si512(quarter(0));
    KT_UNROLL for (int q = 1; q < 4; q++)
      a[r] = _mm512_mask_broadcast_i32x4(a[r], static_cast<__mmask16>(15 << 4 * q), quarter(q));
  }
  const __m512i t0 = _mm512_unpacklo_epi32(a[0], a[1]), t1 = _mm512_unpackhi_epi32(a[0], a[1]);
  const __m512i t2 = _mm512_unpacklo_epi32(a[2], a[3]), t3 = _mm512_unpackhi_epi32(a[2], a[3]);
  w[0] = _mm512_unpacklo_epi64(t0, t2), w[1] = _mm512_unpackhi_epi64(t0, t2);
  w[2] = _mm512_unpacklo_epi64(t1, t3), w[3] = _mm512_unpackhi_epi64(t1, t3);
}

KT_INLINE I32 greater_i32(I32 a, I32 b) { return _mm512_movm_epi32(_mm512_cmpgt_epi32_mask(a, b)); }

// For the quantization of activations.
KT_INLINE F32 as_f32(I32 v) { return _mm512_castsi512_ps(v); }
KT_INLINE I32 as_i32(F32 v) { return _mm512_castps_si512(v); }
KT_INLINE I32 max_i32(I32 a, I32 b) { return _mm512_max_epi32(a, b); }
KT_INLINE I32 add_i32(I32 a, I32 b) { return _mm512_add_epi32(a, b); }
KT_INLINE int32_t max_lane(I32 v) { return _mm512_reduce_max_epi32(v); }
KT_INLINE int32_t sum_lanes(I32 v) { return _mm512_reduce_add_epi32(v); }
KT_INLINE I32 round_i32(F32 v) { return _mm512_cvtps_epi32(v); }
KT_INLINE void store_i8(int8_t* p, I32 v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(v)); }

}  // namespace ktlinear::tinyblas::KT_TIER

#include "x86_sum.h"
