// Integers for the tiers without AVX2: 256 bits as two 128-bit halves.
#pragma once

#include "avx_f32.h"

namespace ktlinear::tinyblas::KT_TIER {

struct I32 {
  __m128i lo, hi;
};

KT_INLINE I32 load_i(const void* p) {
  const __m128i* q = static_cast<const __m128i*>(p);
  return {_mm_loadu_si128(q), _mm_loadu_si128(q + 1)};
}
KT_INLINE I32 splat_i32(int32_t v) { return {_mm_set1_epi32(v), _mm_set1_epi32(v)}; }
KT_INLINE I32 splat_i8(uint8_t v) { return splat_i32(static_cast<int32_t>(v * 0x01010101u)); }
KT_INLINE I32 band(I32 a, I32 b) { return {_mm_and_si128(a.lo, b.lo), _mm_and_si128(a.hi, b.hi)}; }
KT_INLINE I32 bxor(I32 a, I32 b) { return {_mm_xor_si128(a.lo, b.lo), _mm_xor_si128(a.hi, b.hi)}; }
template <int N>
KT_INLINE I32 shift_right_16(I32 v) {
  return {_mm_srli_epi16(v.lo, N), _mm_srli_epi16(v.hi, N)};
}
template <int N>
KT_INLINE I32 shift_left_16(I32 v) {
  return {_mm_slli_epi16(v.lo, N), _mm_slli_epi16(v.hi, N)};
}
template <int N>
KT_INLINE I32 shift_right_32(I32 v) {
  return {_mm_srli_epi32(v.lo, N), _mm_srli_epi32(v.hi, N)};
}
template <int N>
KT_INLINE I32 shift_left_32(I32 v) {
  return {_mm_slli_epi32(v.lo, N), _mm_slli_epi32(v.hi, N)};
}
KT_INLINE I32 bor(I32 a, I32 b) { return {_mm_or_si128(a.lo, b.lo), _mm_or_si128(a.hi, b.hi)}; }
KT_INLINE I32 and_or(I32 a, I32 b, I32 c) { return bor(band(a, b), c); }
KT_INLINE I32 table16(const uint8_t* t) {
  const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(t));
  return {v, v};
}
KT_INLINE I32 lookup16(I32 table, I32 index) {
  return {_mm_shuffle_epi8(table.lo, index.lo), _mm_shuffle_epi8(table.hi, index.hi)};
}
KT_INLINE I32 load_u8(const uint8_t* p) {
  const __m128i v = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return {_mm_cvtepu8_epi32(v), _mm_cvtepu8_epi32(_mm_srli_si128(v, 4))};
}
KT_INLINE I32 load_s8(const uint8_t* p) {
  const __m128i v = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return {_mm_cvtepi8_epi32(v), _mm_cvtepi8_epi32(_mm_srli_si128(v, 4))};
}
KT_INLINE I32 shift_right_32(I32 v, int n) {
  const __m128i count = _mm_cvtsi32_si128(n);
  return {_mm_srl_epi32(v.lo, count), _mm_srl_epi32(v.hi, count)};
}
KT_INLINE I32 add_i16(I32 a, I32 b) { return {_mm_add_epi16(a.lo, b.lo), _mm_add_epi16(a.hi, b.hi)}; }
KT_INLINE I32 mul_low_16(I32 a, I32 b) { return {_mm_mullo_epi16(a.lo, b.lo), _mm_mullo_epi16(a.hi, b.hi)}; }
KT_INLINE void store_i(void* p, I32 v) {
  _mm_storeu_si128(static_cast<__m128i*>(p), v.lo);
  _mm_storeu_si128(static_cast<__m128i*>(p) + 1, v.hi);
}
KT_INLINE void store_low_16(uint8_t* p, I32 v) {
  const I32 low = band(v, splat_i32(0xFFFF));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_packus_epi32(low.lo, low.hi));
}
KT_INLINE void store_low_8(uint8_t* p, I32 v) {
  const I32 low = band(v, splat_i32(0xFF));
  const __m128i words = _mm_packs_epi32(low.lo, low.hi);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(words, words));
}
KT_INLINE void store_bytes(uint8_t* p, I32 v) {
  const __m128i columns = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m128i lo = _mm_shuffle_epi8(v.lo, columns), hi = _mm_shuffle_epi8(v.hi, columns);
  KT_UNROLL for (int i = 0; i < 2; i++) {
    const __m128i two = i == 0 ? _mm_unpacklo_epi32(lo, hi) : _mm_unpackhi_epi32(lo, hi);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p + i * 32), two);
    _mm_storeh_pd(reinterpret_cast<double*>(p + i * 32 + 16), _mm_castsi128_pd(two));
  }
}
KT_INLINE void load_words(const uint8_t* p, int64_t stride, I32 (&w)[4]) {
  auto half = [&](const uint8_t* q, __m128i& w0, __m128i& w1, __m128i& w2, __m128i& w3) {
    auto row = [&](int r) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(q + r * stride)); };
    const __m128i a = row(0), b = row(1), c = row(2), d = row(3);
    const __m128i t0 = _mm_unpacklo_epi32(a, b), t1 = _mm_unpackhi_epi32(a, b);
    const __m128i t2 = _mm_unpacklo_epi32(c, d), t3 = _mm_unpackhi_epi32(c, d);
    w0 = _mm_unpacklo_epi64(t0, t2), w1 = _mm_unpackhi_epi64(t0, t2);
    w2 = _mm_unpacklo_epi64(t1, t3), w3 = _mm_unpackhi_epi64(t1, t3);
  };
  half(p, w[0].lo, w[1].lo, w[2].lo, w[3].lo);
  half(p + 4 * stride, w[0].hi, w[1].hi, w[2].hi, w[3].hi);
}
KT_INLINE I32 greater_i32(I32 a, I32 b) { return {_mm_cmpgt_epi32(a.lo, b.lo), _mm_cmpgt_epi32(a.hi, b.hi)}; }
KT_INLINE I32 max_i32(I32 a, I32 b) { return {_mm_max_epi32(a.lo, b.lo), _mm_max_epi32(a.hi, b.hi)}; }
KT_INLINE I32 add_i32(I32 a, I32 b) { return {_mm_add_epi32(a.lo, b.lo), _mm_add_epi32(a.hi, b.hi)}; }
KT_INLINE F32 as_f32(I32 v) {
  return _mm256_castsi256_ps(_mm256_insertf128_si256(_mm256_castsi128_si256(v.lo), v.hi, 1));
}
KT_INLINE I32 as_i32(F32 v) {
  const __m256i bits = _mm256_castps_si256(v);
  return {_mm256_castsi256_si128(bits), _mm256_extractf128_si256(bits, 1)};
}
KT_INLINE F32 to_f32(I32 v) {
  return _mm256_cvtepi32_ps(_mm256_insertf128_si256(_mm256_castsi128_si256(v.lo), v.hi, 1));
}
template <int J>
KT_INLINE I32 byte(I32 v) {
  return band(I32{_mm_srli_epi32(v.lo, 8 * J), _mm_srli_epi32(v.hi, 8 * J)}, splat_i32(255));
}

}  // namespace ktlinear::tinyblas::KT_TIER
