// int8 products with vpdpbusd, zmm. What a simd/*_dot.h supplies to int8.h:
//
//   DotFor<D>    the policy for a format; Dot the plain one
//     kAllBytes  codes may be all unsigned bytes
//     kParts     0: a scale's products make one sum, whose start is int32. Else a group's sums; see maddubs_dot.h
//     kXBytes, store_x(out, q)     32 elements of x, rounded, as the product wants them
//     begin(start), end(acc, start)  start and finish of a sum; `start` points to the 32-bit start value of the row of x.
//                                  After end() the 32-bit lanes hold MAGIC + sum of (code - offset) * x.
//     row(acc[PV], w[PV], x)       acc += w . (x, broadcast), for PV vectors: one step of a panel
//     step(acc[PV], w[PV], x)      the same for codes as a decoder gives them
//   dot_peak<CHAINS>(iterations)   runs the instruction alone; returns operations
#pragma once

#include "avx512.h"

#define KT_HAS_DOT

namespace ktlinear::tinyblas::KT_TIER {

struct Dot {
  static constexpr bool kAllBytes = true;
  static constexpr int kParts = 0, kXBytes = 32;
  KT_INLINE static void store_x(void* out, const I32 (&q)[32 / kLanes]) {
    KT_UNROLL for (int i = 0; i < 32 / kLanes; i++) store_i8(static_cast<int8_t*>(out) + i * kLanes, q[i]);
  }
  KT_INLINE static I32 begin(const void* init) { return _mm512_set1_epi32(load_as<int32_t>(init)); }
  KT_INLINE static I32 end(I32 acc, const void*) { return acc; }
  // The signed operand may be broadcast from memory: one micro-fused uop a product.
  KT_INLINE static void step(I32 (&acc)[1], const I32 (&w)[1], const void* x) {
    asm volatile("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc[0]) : "v"(w[0]), "m"(*static_cast<const int32_t*>(x)));
  }
  // One block of assembly, so that the broadcast stays next to its uses: GCC moves separate intrinsics apart and spills.
  KT_INLINE static void row(I32 (&acc)[2], const I32 (&w)[2], const void* x) {
    I32 b;
    asm("vpbroadcastd %3, %2\n\tvpdpbusd %2, %4, %0\n\tvpdpbusd %2, %5, %1"
        : "+v"(acc[0]), "+v"(acc[1]), "=&v"(b)
        : "m"(*static_cast<const int32_t*>(x)), "v"(w[0]), "v"(w[1]));
  }
};
template <class D>
using DotFor = Dot;
template <class D>
struct BytePanel;
template <class D>
using PanelFor = BytePanel<D>;

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
