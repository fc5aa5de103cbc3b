// int8 products with vpdpbusd, zmm. What a simd/*_dot.h supplies to int8.h:
//
//   Dot          the policy for sums that fit 16 bits, DotMid for codes up to 128, DotWide for 8-bit codes (here all the same)
//     kOffset    false where weight() makes the codes signed, so that no offset correction is left
//     weight(code)                 the code as the product wants it
//     begin(init), end(acc, init)  start and finish of a group's sum; `init` points to the 32-bit start value of the row of x.
//                                  After end() the 32-bit lanes hold init + sum over the group of code * x.
//     one(acc, w, x)               acc += w . (4 bytes at x, broadcast)
//     row(acc[PV], w[PV], x)       the same for PV vectors
//   dot_peak<CHAINS>(iterations)   runs the instruction alone; returns operations
#pragma once

#include "avx512.h"

#define KT_HAS_DOT

namespace ktlinear::tinyblas::KT_TIER {

struct Dot {
  static constexpr bool kOffset = true;
  KT_INLINE static I32 weight(I32 code) { return code; }
  KT_INLINE static I32 begin(const void* init) { return _mm512_set1_epi32(load_as<int32_t>(init)); }
  KT_INLINE static I32 end(I32 acc, const void*) { return acc; }
  // The signed operand may be broadcast from memory: one micro-fused uop a product.
  KT_INLINE static I32 one(I32 acc, I32 w, const void* x) {
    asm volatile("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(*static_cast<const int32_t*>(x)));
    return acc;
  }
  // One block of assembly, so that the broadcast stays next to its uses: GCC moves separate intrinsics apart and spills.
  KT_INLINE static void row(I32 (&acc)[2], const I32 (&w)[2], const void* x) {
    I32 b;
    asm("vpbroadcastd %3, %2\n\tvpdpbusd %2, %4, %0\n\tvpdpbusd %2, %5, %1"
        : "+v"(acc[0]), "+v"(acc[1]), "=&v"(b)
        : "m"(*static_cast<const int32_t*>(x)), "v"(w[0]), "v"(w[1]));
  }
};
using DotMid = Dot;
using DotWide = Dot;

template <int CHAINS>
KT_INLINE int64_t dot_peak(int64_t iterations) {
  I32 acc[CHAINS], a = splat_i8(3), b = splat_i8(5);
  KT_UNROLL for (int i = 0; i < CHAINS; i++) acc[i] = splat_i32(0);
  for (int64_t n = 0; n < iterations; n++) {
    KT_UNROLL for (int i = 0; i < CHAINS; i++) asm volatile("vpdpbusd %2, %1, %0" : "+v"(acc[i]) : "v"(a), "v"(b));
  }
  return iterations * CHAINS * 64 * 2;
}

}  // namespace ktlinear::tinyblas::KT_TIER
