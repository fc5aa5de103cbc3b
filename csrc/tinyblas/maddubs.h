// Large M without VNNI: panels and micro-kernel for the int16 sums of simd/maddubs_dot.h.
//
// Panel, one record per group:
//   | 8 steps x PV vectors of codes (16 of int16 codes) | for each scale: PV vectors | for each minimum: PV vectors |
// The scales are fp32; or, in a format with integer sub-scales, pairs of equal int16, and PV vectors of fp32 d follow
// every eight groups. A sub-scale takes the place of the ones in the vpmaddwd that widens a sum, so it costs nothing:
//   y = sum over super-blocks of  d * sum over groups of  dx * isum,   isum = sum of sub-scale * (int16 sums),  |isum| < 2^24
#pragma once

#include "int8.h"

namespace ktlinear::tinyblas::KT_TIER {

template <class K>
inline constexpr int kPairGroupBytes = (K::kXBytes / 4 + K::kScales + K::kMinima) * kPanelStep;

// C[R][kIntPanels * 16] (+)= R rows of x by the panel. With ymm C stays in L1, and so does what is not used step by
// step:
// 12 sums + 2 weights + 1 broadcast + 1 product of 16 registers.
//   Per group and vector of sums: 8 maddubs, 7 or 8 paddw, then for each sum madd, paddd; 2 FMAs and 1 for each minimum.
//   With sub-scales: for each sum madd, all but the first paddd; cvt, 1 FMA; 1 for each minimum.
template <class K, bool SUB_SCALES, int R>
KT_NOINLINE void tile_pairs(const uint8_t* x, const uint8_t* w, int64_t groups, float* c, bool accumulate,
                            const Fetch& ahead) {
  Fetch fetch = ahead;
  using Dot = typename K::Dot;
  constexpr bool in_registers = kBlocking.c_in_registers;
  constexpr int width = kPV * kLanes, codes = K::kXBytes / 4, record = R * K::kRowBytes;
  auto each = [&](auto f) KT_ALWAYS_INLINE_LAMBDA {
    KT_UNROLL for (int r = 0; r < R; r++) {
      KT_UNROLL for (int v = 0; v < kPV; v++)
        f(r, v, c + r * width + v * kLanes);
    }
  };
  F32 acc[R][kPV];
  if constexpr (K::kMinima > 0) {  // first, on their own: C need not be loaded and stored for them
    each([&](int r, int v, const float* p) KT_ALWAYS_INLINE_LAMBDA { acc[r][v] = accumulate ? load(p) : zero(); });
    for (int64_t g = 0; g < groups; g++) {
      const float* sums = reinterpret_cast<const float*>(x + g * record + R * (K::kXBytes + K::kStarts * 4));
      const uint8_t* minima =
          w + g * kPairGroupBytes<K> + (SUB_SCALES ? g / 8 * kPanelStep : 0) + (codes + K::kScales) * kPanelStep;
      KT_UNROLL for (int i = 0; i < K::kMinima; i++)
        each([&](int r, int v, float*) KT_ALWAYS_INLINE_LAMBDA {
          const F32 minimum = load(reinterpret_cast<const float*>(minima + i * kPanelStep) + v * kLanes);
          acc[r][v] = fma(minimum, set1(sums[i * R + r]), acc[r][v]);
        });
    }
    each([&](int r, int v, float* p) KT_ALWAYS_INLINE_LAMBDA { store(p, acc[r][v]); });
  } else if (!accumulate) {
    each([&](int, int, float* p) KT_ALWAYS_INLINE_LAMBDA { store(p, zero()); });
  }
  alignas(64) float block[R * width];     // sums of a super-block
  alignas(64) int32_t totals[R * width];  // of the parts so far
  // Where the sums of groups go.
  float* const out = SUB_SCALES ? block : c;
  auto clear = [&]() KT_ALWAYS_INLINE_LAMBDA {
    KT_UNROLL for (int i = 0; i < R * kPV; i++) {
      if constexpr (in_registers)
        acc[i / kPV][i % kPV] = zero();
      else
        store(out + i * kLanes, zero());
    }
  };
  if constexpr (in_registers && !SUB_SCALES)
    each([&](int r, int v, const float* p) KT_ALWAYS_INLINE_LAMBDA { acc[r][v] = load(p); });
  asm volatile("" ::: "memory");
  const int64_t run = SUB_SCALES ? 8 : groups;
  for (int64_t begin = 0; begin < groups; begin += run) {
    if constexpr (SUB_SCALES) clear();
    for (int64_t g = 0; g < run; g++, w += kPairGroupBytes<K>, x += record) {
      fetch.step<32>();
      KT_UNROLL for (int b = 0; b < record; b += 64)
        prefetch_l1(x + 2 * record + b);
      const float* meta = reinterpret_cast<const float*>(x + R * K::kXBytes);
      const float *dx = meta + (K::kStarts + K::kMinima) * R, *ndx = dx + R;
      const uint8_t* scales = w + codes * kPanelStep;
      for_steps<0, K::kParts>([&]<int I>() KT_ALWAYS_INLINE_LAMBDA {
        constexpr int h = I * K::kScales / K::kParts;
        constexpr bool first = I == (SUB_SCALES ? 0 : K::first_part(h)),
                       last = I + 1 == (SUB_SCALES ? K::kParts : K::first_part(h + 1));
        I32 a[R][kPV];
        KT_UNROLL for (int r = 0; r < R; r++) {
          a[r][0] = Dot::begin(start_of<K>(meta, I * R + r));
          KT_UNROLL for (int v = 1; v < kPV; v++)
            a[r][v] = a[r][0];
        }
        constexpr int begin = K::first_step(I) * codes / 8, end = K::first_step(I + 1) * codes / 8;
        KT_UNROLL for (int s = begin; s < end; s++) {
          I32 u[kPV];
          KT_UNROLL for (int v = 0; v < kPV; v++)
            u[v] = load_i(w + s * kPanelStep + v * kLanes * 4);
          KT_UNROLL for (int r = 0; r < R; r++)
            Dot::row(a[r], u, x + r * K::kXBytes + s * 4);
        }
        I32 scale[kPV];  // loaded once: the compiler may not do so past the stores
        KT_UNROLL for (int v = 0; v < kPV; v++)
          scale[v] = load_i(scales + h * kPanelStep + v * kLanes * 4);
        KT_UNROLL for (int r = 0; r < R; r++) {
          const F32 d = set1(dx[r]), nd = set1(ndx[r]);
          const I32 end = Dot::last(start_of<K>(meta, I * R + r));
          KT_UNROLL for (int v = 0; v < kPV; v++) {
            const int at = r * width + v * kLanes;
            I32 t;
            if constexpr (SUB_SCALES)
              t = madd(a[r][v], scale[v]);
            else
              t = first ? Dot::end(a[r][v], end) : Dot::widen(a[r][v]);
            if constexpr (!first) t = add_i32(t, load_i(totals + at));
            if constexpr (!last) {
              store_i(totals + at, t);
            } else {
              const F32 old = in_registers ? acc[r][v] : load(out + at);
              F32 sum;
              if constexpr (SUB_SCALES)
                sum = fma(to_f32(t), d, old);
              else
                sum = fma(fma(as_f32(t), d, nd), as_f32(scale[v]), old);
              if constexpr (in_registers)
                acc[r][v] = sum;
              else
                store(out + at, sum);
            }
            if constexpr (!in_registers || !last) asm volatile("" ::: "memory");  // or it lives on the stack as well
          }
        }
      });
    }
    if constexpr (SUB_SCALES) {
      each([&](int r, int v, float* p) KT_ALWAYS_INLINE_LAMBDA {
        const F32 d = load(reinterpret_cast<const float*>(w) + v * kLanes);
        store(p, fma(in_registers ? acc[r][v] : load(block + r * width + v * kLanes), d, load(p)));
      });
      w += kPanelStep;
    }
  }
  if constexpr (in_registers && !SUB_SCALES)
    each([&](int r, int v, float* p) KT_ALWAYS_INLINE_LAMBDA { store(p, acc[r][v]); });
}

template <class D>
struct PairPanel {
  using K = KindOf<D>;
  static constexpr bool kSubScales = kHasIntegerScale<D>;
  static_assert(!kSubScales || D::kGroups == 8);
  static constexpr int kTileRows = kBlocking.int_mr;
  static constexpr int64_t at(int64_t g) { return g * kPairGroupBytes<K> + (kSubScales ? g / 8 * kPanelStep : 0); }
  static constexpr int64_t bytes(int64_t groups) { return at(groups); }

  KT_INLINE static void decode(const uint8_t* record, int group, int v, uint8_t* panel, int64_t g, int vector) {
    uint8_t* out = panel + at(g) + vector * kLanes * 4;
    I32 code[8];  // all of them before the first store, which might change the record for all that the compiler knows
    for_steps([&]<int S>() KT_ALWAYS_INLINE_LAMBDA { code[S] = D::template code<S>(record, group, v); });
    KT_UNROLL for (int s = 0; s < 8; s++, out += K::kXBytes / 32 * kPanelStep) {
      if constexpr (K::kXBytes == 64) {
        store_i(out, K::Dot::even(code[s]));
        store_i(out + kPanelStep, K::Dot::odd(code[s]));
      } else {
        store_i(out, code[s]);
      }
    }
    F32 scale[K::kScales];
    KT_UNROLL for (int h = 0; h < K::kScales; h++, out += kPanelStep) {
      scale[h] = D::scale(record, group, h, v);
      if constexpr (kSubScales)
        store_i(out, twice(D::integer_scale(record, group, h, v)));
      else
        store(reinterpret_cast<float*>(out), scale[h]);
    }
    KT_UNROLL for (int i = 0; i < K::kMinima; i++, out += kPanelStep)
      store(reinterpret_cast<float*>(out), minimum_of<D>(record, group, i, v, scale[i]));
    if constexpr (kSubScales)
      if (group == 7) store(reinterpret_cast<float*>(out), D::d(record, v));
  }
  template <int R>
  KT_INLINE static void tile(const uint8_t* x, const uint8_t* w, int64_t groups, const Tile& t) {
    tile_pairs<K, kSubScales, R>(x, w, groups, t.c, t.accumulate, t.fetch);
  }
};

template <class D>
using PanelFor = PairPanel<D>;

}  // namespace ktlinear::tinyblas::KT_TIER
