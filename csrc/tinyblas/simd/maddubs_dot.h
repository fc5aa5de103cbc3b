// int8 products without VNNI: vpmaddubsw (u8 x s8, pairs summed to int16) and vpmaddwd. The tier's header supplies the
// instructions for its width: maddubs, madd, add_i16, abs_i8, sign_i8 (a with the sign of b, or 0). See avx512vnni_dot.h for the
// interface.
//
// Every sum is made opaque to the compiler as soon as it is updated: otherwise GCC computes all products of a group first and
// spills them (300 instead of 480 GOP/s with AVX2).
#pragma once

#include "../scalar.h"

#define KT_HAS_DOT

namespace ktlinear::tinyblas::KT_TIER {

// Small codes: the steps up to the next scale stay in int16 and are widened once. Nibbles in groups of 32 reach
// 8 * 2 * 15 * 127 = 30480.
// Per vector and step: maddubs + paddw; per group: madd + paddd.
struct Dot {
  static constexpr bool kOffset = true;
  KT_INLINE static I32 weight(I32 code) { return code; }
  KT_INLINE static I32 begin(const void*) { return splat_i32(0); }
  KT_INLINE static I32 end(I32 acc, const void* init) {
    return add_i32(madd(acc, splat_i32(0x00010001)), splat_i32(load_as<int32_t>(init)));
  }
  KT_INLINE static I32 one(I32 acc, I32 w, const void* x) {
    acc = add_i16(acc, maddubs(w, splat_i32(load_as<int32_t>(x))));
    opaque(acc);
    return acc;
  }
  template <int PV>
  KT_INLINE static void row(I32 (&acc)[PV], const I32 (&w)[PV], const void* x) {
    const I32 b = splat_i32(load_as<int32_t>(x));
    KT_UNROLL for (int v = 0; v < PV; v++) {
      acc[v] = add_i16(acc[v], maddubs(w[v], b));
      opaque(acc[v]);
    }
  }
};

// Codes up to 128: every pair of products is widened at once; 2 * 128 * 127 = 32512. Per vector and step: maddubs + madd + paddd.
struct DotMid {
  static constexpr bool kOffset = true;
  KT_INLINE static I32 weight(I32 code) { return code; }
  KT_INLINE static I32 begin(const void* init) { return splat_i32(load_as<int32_t>(init)); }
  KT_INLINE static I32 end(I32 acc, const void*) { return acc; }
  KT_INLINE static I32 one(I32 acc, I32 w, const void* x) {
    acc = add_i32(acc, madd(maddubs(w, splat_i32(load_as<int32_t>(x))), splat_i32(0x00010001)));
    opaque(acc);
    return acc;
  }
  template <int PV>
  KT_INLINE static void row(I32 (&acc)[PV], const I32 (&w)[PV], const void* x) {
    KT_UNROLL for (int v = 0; v < PV; v++) acc[v] = one(acc[v], w[v], x);
  }
};

// 8-bit codes: |w| unsigned times x with w's sign. A pair stays below 2 * 128 * 127 = 32512. The code's offset of 128 is undone by
// the xor, so no correction is left. Per vector and step: sign + maddubs + madd + paddd (abs is shared by the rows of x).
struct DotWide {
  static constexpr bool kOffset = false;
  KT_INLINE static I32 weight(I32 code) { return bxor(code, splat_i8(0x80)); }
  KT_INLINE static I32 begin(const void* init) { return splat_i32(load_as<int32_t>(init)); }
  KT_INLINE static I32 end(I32 acc, const void*) { return acc; }
  KT_INLINE static I32 one(I32 acc, I32 w, const void* x) {
    const I32 b = splat_i32(load_as<int32_t>(x));
    acc = add_i32(acc, madd(maddubs(abs_i8(w), sign_i8(b, w)), splat_i32(0x00010001)));
    opaque(acc);
    return acc;
  }
  template <int PV>
  KT_INLINE static void row(I32 (&acc)[PV], const I32 (&w)[PV], const void* x) {
    KT_UNROLL for (int v = 0; v < PV; v++) acc[v] = one(acc[v], w[v], x);
  }
};

// The plain chain maddubs + madd + paddd, which the benchmarks take as the yardstick.
template <int CHAINS>
KT_INLINE int64_t dot_peak(int64_t iterations) {
  I32 acc[CHAINS];
  KT_UNROLL for (int i = 0; i < CHAINS; i++) acc[i] = splat_i32(i);
  I32 a = splat_i8(3), b = splat_i8(5);
  for (int64_t n = 0; n < iterations; n++) {
    KT_UNROLL for (int i = 0; i < CHAINS; i++) {
      opaque(a);  // or the product is computed once
      acc[i] = add_i32(acc[i], madd(maddubs(a, b), splat_i32(0x00010001)));
    }
  }
  KT_UNROLL for (int i = 0; i < CHAINS; i++) opaque(acc[i]);
  return iterations * CHAINS * kLanes * 4 * 2;
}

}  // namespace ktlinear::tinyblas::KT_TIER
