// The fp32 micro-kernel for gemm.h. W comes from a Source, whatever type it has.
//
//   x packed   for each K slice, for each tile: [kc][MR]     (a broadcast reads one lane, 32 bits)
//   panel      [kc][NR], NR = nv * lanes
//
// An Arithmetic says what a lane holds, one number or more of K, and how lanes are multiplied. K counts lanes in here.
#pragma once

#include "gemm.h"

namespace ktlinear::tinyblas::KT_TIER {

inline constexpr int kMR = kBlocking.mr, kNV = kBlocking.nv, kNR = kNV * kLanes;

struct Fp32 {
  static constexpr int kPer = 1;  // elements of K in a lane
  KT_INLINE static F32 multiply_add(F32 a, F32 b, F32 c) { return fma(a, b, c); }
  // kLanes lanes of x's row m from lane k on, all of them whole; any single one.
  KT_INLINE static F32 load_x(const Problem& p, int64_t m, int64_t k) {
    return load_float(p.x, p.x_type, x_index(p, m, k));
  }
  KT_INLINE static float x_lane(const Problem& p, int64_t m, int64_t k) {
    return load_element(p.x, p.x_type, x_index(p, m, k));
  }
};

// R rows of x by V vectors of W. Per step of K: V loads, R broadcasts, R * V FMAs on two ports.
//   AVX-512, 8 x 3: 24 FMA, 12 cycles, 11 loads in 12 cycles of two load ports: bound by the FMAs, ceiling 100 %.
//   AVX2,    6 x 2: 12 FMA,  6 cycles,  8 loads in  6 cycles of two load ports: the same.
template <class Arithmetic, int R, int V>
KT_NOINLINE void tile_f32(const float* x, const float* w, int64_t kc, float* c, bool accumulate, const Fetch& ahead) {
  Fetch fetch = ahead;
  F32 acc[R][V];
  KT_UNROLL for (int r = 0; r < R; r++) {
    KT_UNROLL for (int v = 0; v < V; v++)
      acc[r][v] = zero();
  }
  auto one = [&](const float* xk, const float* wk) KT_ALWAYS_INLINE_LAMBDA {
    F32 b[V];
    KT_UNROLL for (int v = 0; v < V; v++)
      b[v] = load(wk + v * kLanes);
    KT_UNROLL for (int r = 0; r < R; r++) {
      const F32 a = set1(xk[r]);
      KT_UNROLL for (int v = 0; v < V; v++)
        acc[r][v] = Arithmetic::multiply_add(a, b[v], acc[r][v]);
    }
  };
  int64_t k = 0;
  for (; k + 16 <= kc; k += 16) {
    fetch.step<16>();
    _Pragma("GCC unroll 4") for (int j = 0; j < 16; j++, x += kMR, w += kNR) one(x, w);
  }
  for (; k < kc; k++, x += kMR, w += kNR) one(x, w);
  KT_UNROLL for (int r = 0; r < R; r++) {
    KT_UNROLL for (int v = 0; v < V; v++) {
      float* p = c + r * kNR + v * kLanes;
      store(p, accumulate ? add(acc[r][v], load(p)) : acc[r][v]);
    }
  }
}

template <class Arithmetic, int V>
KT_INLINE void tile_f32_rows(const Tile& t, const float* x) {
  const float* w = static_cast<const float*>(t.panel);
  with_rows<kMR>(t.rows, [&]<int R>() { tile_f32<Arithmetic, R, V>(x, w, t.kc, t.c, t.accumulate, t.fetch); });
}

// Source:  void fill(int64_t n, int vectors, int64_t k, int64_t kc, float* panel)
//          NextSlice next(int64_t n, int64_t k, int64_t kc)
template <class Source, class Arithmetic = Fp32>
struct KernelF32 {
  static constexpr int kWidth = kNR, kTileRows = kMR;
  static constexpr int64_t panel_bytes(int64_t kc) { return kc * kNR * 4; }

  const Plan& plan;
  Source source;
  int64_t n_total;

  void fill(int64_t n, int64_t k, int64_t kc, void* panel) const {
    source.fill(n, static_cast<int>(ceil_div(min_of<int64_t>(kNR, n_total - n), kLanes)), k, kc,
                static_cast<float*>(panel));
  }
  NextSlice next(int64_t n, int64_t k, int64_t kc) const { return source.next(n, k, kc); }
  void tile(const Tile& t) const {
    static_assert(kNV <= 3);
    const float* x = static_cast<const float*>(t.x) + (t.k * plan.tiles + t.index * t.kc) * kMR;
    const int64_t vectors = ceil_div(t.columns, kLanes);  // a last panel with fewer rows of W: fewer vectors
    if constexpr (kNV >= 3)
      if (vectors == 3) return tile_f32_rows<Arithmetic, 3>(t, x);
    return vectors == 2 ? tile_f32_rows<Arithmetic, 2>(t, x) : tile_f32_rows<Arithmetic, 1>(t, x);
  }
};

template <class Source>
KT_INLINE void plan_gemm_f32(Plan& plan, const Problem& p, int threads, int64_t kc, int64_t record) {
  plan_gemm<KernelF32<Source>>(plan, p, threads, kc, record, kBlocking.block_panels);
  plan.activation_bytes = int64_t{plan.tiles} * kMR * p.k * 4;
}

// Rows of x, converted to lanes and transposed into tiles [begin, end).
template <class Arithmetic = Fp32>
KT_INLINE void pack_x_f32(const Problem& p, const Plan& plan, float* out, int64_t begin, int64_t end) {
  const int64_t lanes = ceil_div(p.k, Arithmetic::kPer), whole = p.k / Arithmetic::kPer;
  const Parts tiles(p.m, plan.tiles);
  for (int64_t t = begin; t < end; t++) {
    const int64_t row = tiles.begin(t);
    const int rows = tiles.count(t);
    for (int64_t k0 = 0; k0 < lanes; k0 += plan.kc) {
      const int64_t kc = min_of<int64_t>(plan.kc, lanes - k0);
      float* o = out + (k0 * plan.tiles + t * kc) * kMR;
      int64_t k = 0;
      for (; k + kLanes <= min_of(kc, whole - k0); k += kLanes) {
        KT_UNROLL for (int r0 = 0; r0 < kMR; r0 += kLanes) {
          F32 v[kLanes];
          KT_UNROLL for (int r = 0; r < kLanes; r++)
            v[r] = r0 + r < rows ? Arithmetic::load_x(p, row + r0 + r, k0 + k) : zero();
          transpose(v);
          constexpr int width = kMR < kLanes ? kMR : kLanes;
          KT_UNROLL for (int i = 0; i < kLanes; i++)
            store_n(o + (k + i) * kMR + r0, v[i], min_of(width, kMR - r0));
        }
      }
      for (; k < kc; k++)
        for (int r = 0; r < rows; r++) o[k * kMR + r] = Arithmetic::x_lane(p, row + r, k0 + k);
    }
  }
}

}  // namespace ktlinear::tinyblas::KT_TIER
