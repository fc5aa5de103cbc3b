// int8 products with vpdpbusd, ymm (VEX encoding). See avx512vnni_dot.h for the interface.
#pragma once

#include "avx2_int.h"

#define KT_HAS_DOT

namespace ktlinear::tinyblas::KT_TIER {

struct Dot {
  static constexpr bool kAllBytes = true;
  static constexpr int kParts = 0, kXBytes = 32;
  KT_INLINE static void store_x(void* out, const I32 (&q)[32 / kLanes]) {
    KT_UNROLL for (int i = 0; i < 32 / kLanes; i++) store_i8(static_cast<int8_t*>(out) + i * kLanes, q[i]);
  }
  KT_INLINE static I32 begin(const void* init) { return _mm256_set1_epi32(load_as<int32_t>(init)); }
  KT_INLINE static I32 end(I32 acc, const void*) { return acc; }
  KT_INLINE static void row(I32 (&acc)[2], const I32 (&w)[2], const void* x) {
    I32 b;
    asm("vpbroadcastd %3, %2\n\t%{vex%} vpdpbusd %2, %4, %0\n\t%{vex%} vpdpbusd %2, %5, %1"
        : "+x"(acc[0]), "+x"(acc[1]), "=&x"(b)
        : "m"(*static_cast<const int32_t*>(x)), "x"(w[0]), "x"(w[1]));
  }
  KT_INLINE static void step(I32 (&acc)[1], const I32 (&w)[1], const void* x) {
    acc[0] = _mm256_dpbusd_avx_epi32(acc[0], w[0], _mm256_set1_epi32(load_as<int32_t>(x)));
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
    KT_UNROLL for (int i = 0; i < CHAINS; i++) asm volatile("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc[i]) : "x"(a), "x"(b));
  }
  return iterations * CHAINS * 32 * 2;
}

}  // namespace ktlinear::tinyblas::KT_TIER
