// Float weights: fp32, fp16 or bf16 rows, any float input, fp32 accumulation.
//
// Small M: dot products straight from W's rows, each row read once and in order. Large M: gemm_f32.h, W converted while a panel
// is packed, so 16-bit weights run at fp32 speed on CPUs without 16-bit arithmetic.
#pragma once

#include "gemm_f32.h"

namespace ktlinear::tinyblas::KT_TIER {

enum FloatPath { kDots, kPanels };  // small M, large M

template <Type T>
KT_INLINE F32 load_weight(const char* p) {
  if constexpr (T == Type::F32) return load(reinterpret_cast<const float*>(p));
  if constexpr (T == Type::F16) return load_f16(reinterpret_cast<const uint16_t*>(p));
  if constexpr (T == Type::BF16) return load_bf16(reinterpret_cast<const uint16_t*>(p));
}
// The first n lanes; the others 0.
template <Type T>
KT_INLINE F32 load_weight_n(const char* p, int n) {
  alignas(64) char buffer[kLanes * 4] = {};
  std::memcpy(buffer, p, static_cast<size_t>(n) * element_bytes(T));
  return load_weight<T>(buffer);
}

// ---------------------------------------------------------------- large M

template <Type T>
struct FloatRows {
  const Problem& p;
  const char* row(int64_t n) const { return static_cast<const char*>(p.w) + n * p.ldw; }

  void fill(int64_t n, int vectors, int64_t k0, int64_t kc, float* panel) const {
    for (int v = 0; v < vectors; v++, panel += kLanes, n += kLanes) {
      const int rows = static_cast<int>(min_of<int64_t>(kLanes, p.n - n));
      const char* w = row(n) + k0 * element_bytes(T);
      int64_t k = 0;
      for (; k + kLanes <= kc; k += kLanes) {
        F32 t[kLanes];
        if (rows == kLanes) {
    KT_UNROLL for (int r = 0; r < kLanes; r++) t[r] = load_weight<T>(w + r * p.ldw + k * element_bytes(T));
        } else {
          KT_UNROLL for (int r = 0; r < kLanes; r++)
            t[r] = r < rows ? load_weight<T>(w + r * p.ldw + k * element_bytes(T)) : zero();
        }
        transpose(t);
        KT_UNROLL for (int i = 0; i < kLanes; i++) store(panel + (k + i) * kNR, t[i]);
      }
      for (; k < kc; k++)
        for (int r = 0; r < kLanes; r++)
          panel[k * kNR + r] = r < rows ? load_element(w + r * p.ldw, T, k) : 0.f;
    }
  }
  NextSlice next(int64_t n, int64_t k, int64_t kc) const {
    return {row(n) + k * element_bytes(T), p.ldw, kc * element_bytes(T), kNR};
  }
};

// ---------------------------------------------------------------- small M

inline constexpr int kDotRows = 4;           // rows of W at once: four sequential streams a thread
inline constexpr int kDotChunk = 512;        // K per pass where several tiles of x share the rows of W in L1
inline constexpr int64_t kDotCached = 64 << 10;  // bytes of W that need no software prefetch
inline constexpr int kDotAhead = 2048;       // bytes of software prefetch: weights come from memory, once

KT_INLINE int64_t padded(int64_t k) { return ceil_div(k, kLanes) * kLanes; }

// c[R][NW] += x[R][kc] . W[NW][kc]. Per kLanes of K: NW weight loads, R loads of x, R * NW FMAs.
// Rows [f0, f1) of W are fetched `ahead` bytes further on: to L2 from far ahead, since more lines can be on their way
// there than to L1; to L1 where other tiles still work on the lines before.
template <Type T, int R, int NW>
KT_INLINE void dots(const char* w, int64_t ldw, const float* x, int64_t ldx, int64_t kc, F32* c, bool accumulate, int f0,
                    int f1, int64_t ahead, bool to_l2) {
  F32 acc[R][NW];
  KT_UNROLL for (int r = 0; r < R; r++) KT_UNROLL for (int j = 0; j < NW; j++)
    acc[r][j] = accumulate ? c[r * kDotRows + j] : zero();
  auto step = [&](int64_t k, auto weight) KT_ALWAYS_INLINE_LAMBDA {
    F32 a[R];
    KT_UNROLL for (int r = 0; r < R; r++) a[r] = load(x + r * ldx + k);
    KT_UNROLL for (int j = 0; j < NW; j++) {
      const F32 b = weight(w + j * ldw + k * element_bytes(T));
      KT_UNROLL for (int r = 0; r < R; r++) acc[r][j] = fma(a[r], b, acc[r][j]);
    }
  };
  constexpr int kLine = 64 / element_bytes(T);  // elements a cache line; a multiple of kLanes
  int64_t k = 0;
  for (; k + kLine <= kc; k += kLine) {
    for (int j = f0; j < f1; j++) {
      const char* fetch = w + j * ldw + k * element_bytes(T) + ahead;
      to_l2 ? prefetch_l2(fetch) : prefetch_l1(fetch);
    }
    KT_UNROLL for (int i = 0; i < kLine; i += kLanes) step(k + i, [](const char* p) KT_ALWAYS_INLINE_LAMBDA { return load_weight<T>(p); });
  }
  for (; k + kLanes <= kc; k += kLanes) step(k, [](const char* p) KT_ALWAYS_INLINE_LAMBDA { return load_weight<T>(p); });
  if (k < kc) {
    const int n = static_cast<int>(kc - k);
    step(k, [n](const char* p) KT_ALWAYS_INLINE_LAMBDA { return load_weight_n<T>(p, n); });
  }
  KT_UNROLL for (int r = 0; r < R; r++) KT_UNROLL for (int j = 0; j < NW; j++) c[r * kDotRows + j] = acc[r][j];
}

template <Type T, int NW>
KT_NOINLINE void dots_rows(int rows, const char* w, int64_t ldw, const float* x, int64_t ldx, int64_t kc, F32* c,
                           bool accumulate, int f0, int f1, int64_t ahead, bool to_l2) {
  with_rows<kBlocking.dot_mr>(rows, [&]<int R>() KT_ALWAYS_INLINE_LAMBDA {
    dots<T, R, NW>(w, ldw, x, ldx, kc, c, accumulate, f0, f1, ahead, to_l2);
  });
}

// All rows of x by rows [n, n + NW) of W.
template <Type T, int NW>
KT_INLINE void dot_block(const Problem& p, const float* x, F32* c, int64_t n) {
  const int tiles = static_cast<int>(ceil_div(p.m, kBlocking.dot_mr));
  const int64_t ldx = padded(p.k), row_bytes = p.k * element_bytes(T);
  // One tile: one pass over K, of which the end fetches the rows of the next block instead. Several: chunks.
  const int64_t near = min_of<int64_t>(kDotAhead, row_bytes / 128 * 64);
  const int64_t chunk = tiles > 1 ? kDotChunk : near > 0 ? (row_bytes - near) / 64 * 64 / element_bytes(T) : p.k;
  const char* w = static_cast<const char*>(p.w) + n * p.ldw;
  const bool cold = p.n * p.ldw > kDotCached;
  for (int64_t k = 0; k < p.k; k += chunk) {
    const int64_t kc = min_of(chunk, p.k - k);
    // Several tiles fetch the next chunk together, each its share of the rows.
    const int64_t step = tiles == 1 ? near : kc * element_bytes(T);
    const int64_t ahead = k + kc < p.k ? step : NW * p.ldw - k * element_bytes(T);
    for (int t = 0; t < tiles; t++) {
      const int64_t row = tile_begin(p.m, tiles, t);
      const int rows = static_cast<int>(tile_begin(p.m, tiles, t + 1) - row);
      dots_rows<T, NW>(rows, w + k * element_bytes(T), p.ldw, x + row * ldx + k, ldx, kc, c + row * kDotRows, k > 0,
                       NW * t / tiles, cold ? NW * (t + 1) / tiles : 0, ahead, tiles == 1);
    }
  }
  for (int64_t m = 0; m < p.m; m++) {
    float y[NW];
    if constexpr (NW == 4) {
      sum4(c + m * kDotRows, y);
    } else {
      KT_UNROLL for (int j = 0; j < NW; j++) y[j] = sum(c[m * kDotRows + j]);
    }
    store_outputs<NW>(p, m, n, y, NW);
  }
}

template <Type T>
KT_INLINE void sgemm_typed(const Problem& p, const Plan& plan, const void* activations, void* scratch, int64_t begin,
                           int64_t end) {
  const float* x = static_cast<const float*>(activations);
  if (plan.path == kDots) {
    for (int64_t unit = begin; unit < end; unit++) {
      int64_t n = unit * kDotRows;
      if (n + kDotRows <= p.n)
        dot_block<T, kDotRows>(p, x, static_cast<F32*>(scratch), n);
      else
        for (; n < p.n; n++) dot_block<T, 1>(p, x, static_cast<F32*>(scratch), n);
    }
  } else {
    gemm(p, plan, KernelF32<FloatRows<T>>{plan, {p}, p.n}, x, scratch, begin, end);
  }
}

// ---------------------------------------------------------------- the interface

static Plan sgemm_plan(const Problem& p, int threads) {
  Plan plan{};
  if (p.m <= kBlocking.dot_max) {
    plan.path = kDots;
    plan.activation_bytes = p.m * padded(p.k) * 4;
    plan.scratch_bytes = p.m * kDotRows * static_cast<int64_t>(sizeof(F32));
    plan.prepare_units = p.m;
    plan.compute_units = ceil_div(p.n, kDotRows);
  } else {
    plan.path = kPanels;
    plan_gemm_f32<FloatRows<Type::F32>>(plan, p, threads, kBlocking.kc, 64);
  }
  return plan;
}
static bool sgemm_prepare(const Problem& p, const Plan& plan, void* activations, int64_t begin, int64_t end) {
  float* out = static_cast<float*>(activations);
  if (plan.path == kPanels) {
    pack_x_f32(p, plan, out, begin, end);
    return true;
  }
  for (int64_t m = begin; m < end; m++) {
    float* o = out + m * padded(p.k);
    int64_t k = 0;
    for (; k + kLanes <= p.k; k += kLanes) store(o + k, load_float(p.x, p.x_type, x_index(p, m, k)));
    if (k < p.k) {
      store(o + k, zero());
      for (; k < p.k; k++) o[k] = load_element(p.x, p.x_type, x_index(p, m, k));
    }
  }
  return true;
}
static void sgemm_compute(const Problem& p, const Plan& plan, const void* activations, void* scratch, int64_t begin,
                          int64_t end) {
  switch (p.w_type) {
    case Type::F16:
      return sgemm_typed<Type::F16>(p, plan, activations, scratch, begin, end);
    case Type::BF16:
      return sgemm_typed<Type::BF16>(p, plan, activations, scratch, begin, end);
    default:
      return sgemm_typed<Type::F32>(p, plan, activations, scratch, begin, end);
  }
}

extern const Kernels sgemm;
constinit const Kernels sgemm{sgemm_plan, sgemm_prepare, sgemm_compute};

}  // namespace ktlinear::tinyblas::KT_TIER
