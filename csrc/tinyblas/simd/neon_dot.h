// int8 products for Arm. The tier's header supplies dot(acc, w, x), which adds four products to each 32-bit lane, x
// being four bytes in every lane, and kUnsignedCodes: whether it takes w as unsigned bytes. See vnni_dot.h for the
// interface.
//
// A signed product takes codes below 128 as they are. Of larger ones (Q8_0, IQ4) it takes 128 off, which is an
// exclusive or, and their sums start that much higher.
#pragma once

#include "neon.h"

#define KT_HAS_DOT

namespace ktlinear::tinyblas::KT_TIER {

struct Dot {
  static constexpr bool kAllBytes = kUnsignedCodes, kPairs = false;
  static constexpr int kParts = 0, kXBytes = 32;
  KT_INLINE static void store_x(void* out, const I32 (&q)[8]) {
    KT_UNROLL for (int i = 0; i < 8; i++)
      store_i8(static_cast<int8_t*>(out) + i * 4, q[i]);
  }
  KT_INLINE static I32 begin(const void* start) { return splat_i32(load_as<int32_t>(start)); }
  KT_INLINE static I32 end(I32 acc, const void*) { return acc; }
  KT_INLINE static I32 widen(I32 acc) { return acc; }  // sums are int32 already
  template <int PV>
  KT_INLINE static void row(I32 (&acc)[PV], const I32 (&w)[PV], const void* x) {
    const I32 b = vld1q_dup_s32(static_cast<const int32_t*>(x));
    KT_UNROLL for (int v = 0; v < PV; v++) {
      acc[v] = dot(acc[v], w[v], b);
      asm volatile("" : "+w"(acc[v]));  // in this order: GCC loads all that a group needs first, and spills it
    }
  }
  template <int PV>
  KT_INLINE static void step(I32 (&acc)[PV], const I32 (&w)[PV], const void* x) {
    row(acc, w, x);
  }
};

template <int SCALES>
struct DotLargeCodes : Dot {
  static constexpr int kParts = SCALES;
  KT_INLINE static void starts(const I32 (&q)[8], int offset, int32_t* out) {
    KT_UNROLL for (int h = 0; h < SCALES; h++) {
      I32 total = q[h * 8 / SCALES];
      KT_UNROLL for (int i = h * 8 / SCALES + 1; i < (h + 1) * 8 / SCALES; i++)
        total = add_i32(total, q[i]);
      out[h] = kMagicBits - (offset - 128) * sum_lanes(total);
    }
  }
  template <int PV>
  KT_INLINE static void row(I32 (&acc)[PV], const I32 (&w)[PV], const void* x) {
    I32 less[PV];  // computed once for all rows of x: the compiler sees that it is the same
    KT_UNROLL for (int v = 0; v < PV; v++)
      less[v] = bxor(w[v], splat_i8(128));
    Dot::row(acc, less, x);
  }
  template <int PV>
  KT_INLINE static void step(I32 (&acc)[PV], const I32 (&w)[PV], const void* x) {
    row(acc, w, x);
  }
};

template <class D>
struct DotOf {
  using type = Dot;
};
template <class D>
  requires(!kUnsignedCodes && D::kMaxCode > 127)
struct DotOf<D> {
  using type = DotLargeCodes<D::kScales>;
  static_assert(!D::kHasMinimum);
};
template <class D>
using DotFor = typename DotOf<D>::type;
template <class D>
struct BytePanel;
template <class D>
using PanelFor = BytePanel<D>;

template <int CHAINS>
KT_INLINE int64_t dot_peak(int64_t iterations) {
  I32 acc[CHAINS], a = splat_i8(3), b = splat_i8(5);
  KT_UNROLL for (int i = 0; i < CHAINS; i++)
    acc[i] = splat_i32(i);
  for (int64_t n = 0; n < iterations; n++) {
    KT_UNROLL for (int i = 0; i < CHAINS; i++) {
      asm volatile("" : "+w"(a));  // or a product of several instructions is partly computed once
      acc[i] = dot(acc[i], a, b);
    }
  }
  KT_UNROLL for (int i = 0; i < CHAINS; i++)
    asm volatile("" : "+w"(acc[i]));
  return iterations * CHAINS * kLanes * 4 * 2;
}

}  // namespace ktlinear::tinyblas::KT_TIER
