// int8 products without VNNI: vpmaddubsw (u8 x s8, pairs summed to int16, saturating) and vpmaddwd. The tier's header
// supplies the instructions for its width: maddubs, madd, add_i16. See vnni_dot.h for the interface.
//
// Sums stay in int16 as long as they fit, then are widened once. They may wrap in between: only the end has to fit, and
// each pair of products. So what codes reach less their offset counts, if a sum starts at -offset * (the sum of x in
// its lane).
//   Dot          codes as they are: nibbles in groups of 32 reach 8 * 2 * 15 * 127 = 30480
//   DotLanes     starts of its own for both int16 lanes: Q5_0 reaches 16 * 16 * 127 = 32512, Q6_K in groups of 16 8 * 32 * 127
//   DotWide      8-bit codes: all in int16, vpmaddwd + paddd
//
// Every sum is made opaque to the compiler as soon as it is updated: otherwise GCC computes all products of a group
// first and spills them (300 instead of 480 GOP/s with AVX2).
#pragma once

#include "../scalar.h"

#define KT_HAS_DOT
#define KT_HAS_MADDUBS

namespace ktlinear::tinyblas::KT_TIER {

// Per vector and step: maddubs + paddw; per sum: madd + paddd.
struct Dot {
  static constexpr bool kAllBytes = false, kPairs = false;
  static constexpr int kParts = 0, kXBytes = 32;
  KT_INLINE static void store_x(void* out, const I32 (&q)[32 / kLanes]) {
    KT_UNROLL for (int i = 0; i < 32 / kLanes; i++)
      store_i8(static_cast<int8_t*>(out) + i * kLanes, q[i]);
  }
  KT_INLINE static I32 begin(const void*) { return splat_i32(0); }
  KT_INLINE static I32 widen(I32 acc) { return madd(acc, splat_i32(0x00010001)); }
  KT_INLINE static I32 last(const void* start) { return splat_i32(load_as<int32_t>(start)); }  // added at the end
  KT_INLINE static I32 end(I32 acc, I32 last) { return add_i32(widen(acc), last); }
  KT_INLINE static I32 end(I32 acc, const void* start) { return end(acc, last(start)); }
  template <int PV>
  KT_INLINE static void row(I32 (&acc)[PV], const I32 (&w)[PV], const void* x) {
    const I32 b = splat_i32(load_as<int32_t>(x));
    KT_UNROLL for (int v = 0; v < PV; v++) {
      acc[v] = add_i16(acc[v], maddubs(w[v], b));
      opaque(acc[v]);
    }
  }
  template <int PV>
  KT_INLINE static void step(I32 (&acc)[PV], const I32 (&w)[PV], const void* x) {
    row(acc, w, x);
  }
};

// The group in PARTS sums, each of ceil(8 / PARTS) steps or less.
template <int PARTS>
struct DotLanes : Dot {
  static constexpr int kParts = PARTS;
  // For each part a pair of int16: -offset * the sums of elements 4s, 4s + 1 and 4s + 2, 4s + 3 over its steps s.
  KT_INLINE static void starts(const I32 (&q)[32 / kLanes], int offset, int32_t* out) {
    alignas(64) int32_t steps[32];
    KT_UNROLL for (int i = 0; i < 32 / kLanes; i++)
      store_i(steps + i * kLanes, q[i]);
    KT_UNROLL for (int i = 0; i < PARTS; i++) {
      __m128i sum = _mm_setzero_si128();
      KT_UNROLL for (int s = (8 * i + PARTS - 1) / PARTS; s < (8 * i + 8 + PARTS - 1) / PARTS; s++)
        sum = _mm_add_epi32(sum, _mm_load_si128(reinterpret_cast<const __m128i*>(steps + s * 4)));
      const __m128i pair = _mm_mullo_epi16(_mm_hadd_epi32(sum, sum), _mm_set1_epi32(-offset));  // modulo 2^16
      out[i] = _mm_cvtsi128_si32(_mm_shufflelo_epi16(pair, 0x08));
    }
  }
  KT_INLINE static I32 begin(const void* start) { return splat_i32(load_as<int32_t>(start)); }
  KT_INLINE static I32 last(const void*) { return splat_i32(kMagicBits); }
  KT_INLINE static I32 end(I32 acc, I32 last) { return add_i32(widen(acc), last); }
  KT_INLINE static I32 end(I32 acc, const void* start) { return end(acc, last(start)); }
};

// x as int16, the even elements of a step before the odd ones, since masking and shifting part the codes that way.
// Per vector and two elements: madd + paddd.
struct DotWide {
  static constexpr bool kAllBytes = false, kPairs = false;
  static constexpr int kParts = 0, kXBytes = 64;
  KT_INLINE static void store_x(void* out, const I32 (&q)[32 / kLanes]) {
    alignas(64) int32_t x[32];
    KT_UNROLL for (int i = 0; i < 32 / kLanes; i++)
      store_i(x + i * kLanes, q[i]);
    const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
    KT_UNROLL for (int i = 0; i < 4; i++) {
      const __m128i* p = reinterpret_cast<const __m128i*>(x + i * 8);
      const __m128i words = _mm_packs_epi32(_mm_load_si128(p), _mm_load_si128(p + 1));
      _mm_storeu_si128(static_cast<__m128i*>(out) + i, _mm_shuffle_epi8(words, order));
    }
  }
  KT_INLINE static I32 even(I32 code) { return band(code, splat_i32(0x00FF00FF)); }
  KT_INLINE static I32 odd(I32 code) { return shift_right_16<8>(code); }
  KT_INLINE static I32 begin(const void* start) { return splat_i32(load_as<int32_t>(start)); }
  KT_INLINE static I32 widen(I32 acc) { return acc; }
  KT_INLINE static I32 last(const void*) { return splat_i32(0); }
  KT_INLINE static I32 end(I32 acc, I32) { return acc; }
  KT_INLINE static I32 end(I32 acc, const void*) { return acc; }
  template <int PV>
  KT_INLINE static void step(I32 (&acc)[PV], const I32 (&w)[PV], const void* x) {
    const int32_t* p = static_cast<const int32_t*>(x);
    const I32 b0 = splat_i32(load_as<int32_t>(p)), b1 = splat_i32(load_as<int32_t>(p + 1));
    KT_UNROLL for (int v = 0; v < PV; v++) {
      acc[v] = add_i32(add_i32(acc[v], madd(even(w[v]), b0)), madd(odd(w[v]), b1));
      opaque(acc[v]);
    }
  }
  template <int PV>
  KT_INLINE static void row(I32 (&acc)[PV], const I32 (&w)[PV], const void* x) {
    const I32 b = splat_i32(load_as<int32_t>(x));
    KT_UNROLL for (int v = 0; v < PV; v++) {
      acc[v] = add_i32(acc[v], madd(w[v], b));
      opaque(acc[v]);
    }
  }
};

// The format has integer sub-scales, which the micro-kernels may multiply sums by.
template <class D>
inline constexpr bool kHasIntegerScale = requires(const uint8_t* record) { D::integer_scale(record, 0, 0, 0); };

// How many sums a group is parted into; 0: as many as scales, codes as they are; -1: no number is enough.
template <class D>
constexpr int parts_of() {
  auto fits = [](int parts, int code) { return 2 * ((8 + parts - 1) / parts) * code * 127 <= 32767; };
  if (fits(D::kScales, D::kMaxCode) && (!kHasIntegerScale<D> || D::kHasMinimum)) return 0;
  const int offset = D::kHasMinimum ? (D::kMaxCode + 1) / 2 : D::kOffset;
  for (int parts = D::kScales; parts <= 4 && D::kMaxCode <= 128; parts += D::kScales)
    if (fits(parts, offset > D::kMaxCode - offset ? offset : D::kMaxCode - offset)) return parts;
  return -1;
}
template <int PARTS>
struct DotOfParts {
  using type = DotLanes<PARTS>;
};
template <>
struct DotOfParts<0> {
  using type = Dot;
};
template <>
struct DotOfParts<-1> {
  using type = DotWide;
};
template <class D>
using DotFor = typename DotOfParts<parts_of<D>()>::type;

// The plain chain maddubs + madd + paddd, which the benchmarks take as the yardstick.
template <int CHAINS>
KT_INLINE int64_t dot_peak(int64_t iterations) {
  I32 acc[CHAINS];
  KT_UNROLL for (int i = 0; i < CHAINS; i++)
    acc[i] = splat_i32(i);
  I32 a = splat_i8(3), b = splat_i8(5);
  for (int64_t n = 0; n < iterations; n++) {
    KT_UNROLL for (int i = 0; i < CHAINS; i++) {
      opaque(a);  // or the product is computed once
      acc[i] = add_i32(acc[i], madd(maddubs(a, b), splat_i32(0x00010001)));
      opaque(acc[i]);  // chain by chain: in the compiler's order they run 10 % slower
    }
  }
  KT_UNROLL for (int i = 0; i < CHAINS; i++)
    opaque(acc[i]);
  return iterations * CHAINS * kLanes * 4 * 2;
}

}  // namespace ktlinear::tinyblas::KT_TIER
