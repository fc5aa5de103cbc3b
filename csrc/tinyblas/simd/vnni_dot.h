// int8 products with vpdpbusd, for the two encodings. The tier's header supplies the vectors, KT_VEX (the prefix that
// asks the assembler for VEX) and, with x broadcast from memory, dot (u8 by s8, four to a lane) and dot_pairs (s16 by
// s16, two to a lane).
//
// What a simd/*_dot.h supplies to int8.h:
//
//   DotFor<D>    the policy for a format; Dot the plain one
//     kAllBytes  codes may be all unsigned bytes
//     kPairs     it has pairs(acc, w, x), pairs_row(acc[PV], w[PV], x): as step and row, of two int16 to a lane
//     kParts     0: a scale's products make one sum, whose start is int32. Else a group's sums; see maddubs_dot.h
//     kXBytes, store_x(out, q)     32 elements of x, rounded, as the product wants them
//     begin(start), end(acc, start)  start and finish of a sum; `start` points to the 32-bit start value of the row of x.
//                                  After end() the 32-bit lanes hold MAGIC + sum of (code - offset) * x.
//     row(acc[PV], w[PV], x)       acc += w . (x, broadcast), for PV vectors: one step of a panel
//     step(acc[PV], w[PV], x)      the same for codes as a decoder gives them
//   dot_peak<CHAINS>(iterations)   runs the instruction alone; returns operations
#pragma once

#define KT_HAS_DOT

namespace ktlinear::tinyblas::KT_TIER {

// acc += w . (x, broadcast). One block of assembly, so that the broadcast stays next to its uses: GCC moves separate
// intrinsics apart and spills.
#define KT_DOT_ROW(instruction)                                                                       \
  I32 b;                                                                                              \
  asm("vpbroadcastd %3, %2\n\t" KT_VEX instruction " %2, %4, %0\n\t" KT_VEX instruction " %2, %5, %1" \
      : "+v"(acc[0]), "+v"(acc[1]), "=&v"(b)                                                          \
      : "m"(*static_cast<const int32_t*>(x)), "v"(w[0]), "v"(w[1]))

struct Dot {
  static constexpr bool kAllBytes = true, kPairs = true;
  static constexpr int kParts = 0, kXBytes = 32;
  KT_INLINE static void store_x(void* out, const I32 (&q)[32 / kLanes]) {
    KT_UNROLL for (int i = 0; i < 32 / kLanes; i++)
      store_i8(static_cast<int8_t*>(out) + i * kLanes, q[i]);
  }
  KT_INLINE static I32 begin(const void* init) { return splat_i32(load_as<int32_t>(init)); }
  KT_INLINE static I32 end(I32 acc, const void*) { return acc; }
  KT_INLINE static I32 widen(I32 acc) { return acc; }  // sums are int32 already
  KT_INLINE static void step(I32 (&acc)[1], const I32 (&w)[1], const void* x) { acc[0] = dot(acc[0], w[0], x); }
  KT_INLINE static void row(I32 (&acc)[2], const I32 (&w)[2], const void* x) { KT_DOT_ROW("vpdpbusd"); }
  KT_INLINE static I32 pairs(I32 acc, I32 w, const void* x) { return dot_pairs(acc, w, x); }
  KT_INLINE static void pairs_row(I32 (&acc)[2], const I32 (&w)[2], const void* x) { KT_DOT_ROW("vpdpwssd"); }
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
  KT_UNROLL for (int i = 0; i < CHAINS; i++)
    acc[i] = splat_i32(0);
  for (int64_t n = 0; n < iterations; n++) {
    KT_UNROLL for (int i = 0; i < CHAINS; i++)
      asm volatile(KT_VEX "vpdpbusd %2, %1, %0" : "+v"(acc[i]) : "v"(a), "v"(b));
  }
  return iterations * CHAINS * kLanes * 4 * 2;
}

}  // namespace ktlinear::tinyblas::KT_TIER
