// Float weights: fp32, fp16 or bf16 rows, any float input, fp32 accumulation.
//
// Small M: dot products straight from W's rows, each row read once and in order. Large M: gemm_f32.h, W converted while
// a panel is packed, so 16-bit weights run at fp32 speed on CPUs without 16-bit arithmetic. With it (KT_HAS_BF16_DOT),
// bf16 x and W are multiplied as they are; fp32 or fp16 x would lose accuracy.
#pragma once

#include "gemm_f32.h"

namespace ktlinear::tinyblas::KT_TIER {

enum FloatPath { kDots, kPanels };  // small M, large M

// ---------------------------------------------------------------- arithmetic

// W widened to fp32.
template <Type T>
struct Widened : Fp32 {
  using Lane = Fp32;                                   // what x and the products are: one kernel for all types of W
  static constexpr int kLaneBytes = element_bytes(T);  // of W
  // kLanes lanes of W, all of them whole; lane k of a row.
  KT_INLINE static F32 load_w(const char* p) {
    if constexpr (T == Type::F32) return load(reinterpret_cast<const float*>(p));
    if constexpr (T == Type::F16) return load_f16(reinterpret_cast<const uint16_t*>(p));
    if constexpr (T == Type::BF16) return load_bf16(reinterpret_cast<const uint16_t*>(p));
  }
  KT_INLINE static float w_lane(const Problem&, const char* row, int64_t k) { return load_element(row, T, k); }
};

#ifdef KT_HAS_BF16_DOT
// Both bf16: a lane is a pair of neighbours, the last of an odd K with 0.
struct Pairs {
  using Lane = Pairs;
  static constexpr int kPer = 2, kLaneBytes = 4;
  KT_INLINE static F32 multiply_add(F32 a, F32 b, F32 c) { return dot_bf16(a, b, c); }
  KT_INLINE static F32 load_w(const char* p) { return load(reinterpret_cast<const float*>(p)); }
  KT_INLINE static float w_lane(const Problem& p, const char* row, int64_t k) {
    return 2 * k + 1 < p.k ? load_as<float>(row + 4 * k) : bits_as<float>(uint32_t{load_as<uint16_t>(row + 4 * k)});
  }
  KT_INLINE static const char* x_row(const Problem& p, int64_t m) {
    return static_cast<const char*>(p.x) + x_index(p, m, 0) * 2;
  }
  KT_INLINE static F32 load_x(const Problem& p, int64_t m, int64_t k) { return load_w(x_row(p, m) + 4 * k); }
  KT_INLINE static float x_lane(const Problem& p, int64_t m, int64_t k) { return w_lane(p, x_row(p, m), k); }
};
KT_INLINE bool pairs(const Problem& p) { return p.x_type == Type::BF16 && p.w_type == Type::BF16; }
#endif

// f.template operator()<Arithmetic>() for the types of x and W.
template <class F>
KT_INLINE auto with_arithmetic(const Problem& p, F f) {
#ifdef KT_HAS_BF16_DOT
  if (pairs(p)) return f.template operator()<Pairs>();
#endif
  if (p.w_type == Type::F16) return f.template operator()<Widened<Type::F16>>();
  if (p.w_type == Type::BF16) return f.template operator()<Widened<Type::BF16>>();
  return f.template operator()<Widened<Type::F32>>();
}

// ---------------------------------------------------------------- large M

template <class Arithmetic>
struct FloatRows {
  const Problem& p;
  const char* row(int64_t n) const { return static_cast<const char*>(p.w) + n * p.ldw; }

  void fill(int64_t n, int vectors, int64_t k0, int64_t kc, float* panel) const {
    const int64_t whole = min_of(kc, p.k / Arithmetic::kPer - k0);
    for (int v = 0; v < vectors; v++, panel += kLanes, n += kLanes) {
      const int rows = static_cast<int>(min_of<int64_t>(kLanes, p.n - n));
      const char* w = row(n) + k0 * Arithmetic::kLaneBytes;
      int64_t k = 0;
      for (; k + kLanes <= whole; k += kLanes) {
        F32 t[kLanes];
        const char* wk = w + k * Arithmetic::kLaneBytes;
        if (rows == kLanes) {
          KT_UNROLL for (int r = 0; r < kLanes; r++)
            t[r] = Arithmetic::load_w(wk + r * p.ldw);
        } else {
          KT_UNROLL for (int r = 0; r < kLanes; r++)
            t[r] = r < rows ? Arithmetic::load_w(wk + r * p.ldw) : zero();
        }
        transpose(t);
        KT_UNROLL for (int i = 0; i < kLanes; i++)
          store(panel + (k + i) * kNR, t[i]);
      }
      for (; k < kc; k++)
        for (int r = 0; r < kLanes; r++)
          panel[k * kNR + r] = r < rows ? Arithmetic::w_lane(p, row(n + r), k0 + k) : 0.f;
    }
  }
  NextSlice next(int64_t n, int64_t k, int64_t kc) const {
    return {row(n) + k * Arithmetic::kLaneBytes, p.ldw, kc * Arithmetic::kLaneBytes, kNR};
  }
};

// ---------------------------------------------------------------- small M
//
//   x prepared   for each tile of R rows, for each line: [vectors a line][R][lanes]    (one stream, whatever M)
//   c            [M][4] vectors of partial sums, kept between the chunks of K
//
// A line is 64 bytes of a row of W; a chunk so many bytes of four rows that they stay in L1 while all tiles pass over
// them.

inline constexpr int kDotRows = 4;               // rows of W at once: four sequential streams a thread
inline constexpr int kDotChunk = 2048;           // bytes of a row, about; also how far ahead W is fetched
inline constexpr int64_t kDotCached = 64 << 10;  // bytes of W that need no software prefetch

template <class Arithmetic>
inline constexpr int kLineVectors = 64 / Arithmetic::kLaneBytes / kLanes;

template <class Arithmetic>
KT_INLINE int64_t line_count(int64_t k) {
  return ceil_div(k, kLineVectors<Arithmetic> * kLanes * Arithmetic::kPer);
}

// What a pass over a chunk fetches meanwhile, as much of rows [first, last), `ahead` bytes further on. Into L2, whose
// misses wait in a longer queue than L1's: a third more bandwidth on Zen 4.
struct FetchRows {
  int first, last;
  int64_t ahead;
};

// c[R][NW] += x[R] . W[NW] over `bytes` of each row of W. Per vector: NW loads of W, R loads of x, R * NW products.
template <class Arithmetic, int R, int NW>
KT_INLINE void dots(const char* w, int64_t ldw, int64_t bytes, const float* x, F32* c, bool accumulate,
                    FetchRows fetch) {
  F32 acc[R][NW];
  KT_UNROLL for (int r = 0; r < R; r++) {
    KT_UNROLL for (int j = 0; j < NW; j++)
      acc[r][j] = accumulate ? c[r * kDotRows + j] : zero();
  }
  auto line = [&](const char* p, int64_t stride) KT_ALWAYS_INLINE_LAMBDA {
    KT_UNROLL for (int v = 0; v < kLineVectors<Arithmetic>; v++, p += kLanes * Arithmetic::kLaneBytes) {
      F32 b[NW];
      KT_UNROLL for (int j = 0; j < NW; j++)
        b[j] = Arithmetic::load_w(p + j * stride);
      KT_UNROLL for (int r = 0; r < R; r++, x += kLanes) {
        const F32 a = load(x);
        KT_UNROLL for (int j = 0; j < NW; j++)
          acc[r][j] = Arithmetic::multiply_add(a, b[j], acc[r][j]);
      }
    }
  };
  int64_t i = 0;
  for (; i + 64 <= bytes; i += 64) {
    for (int j = fetch.first; j < fetch.last; j++) prefetch_l2(w + j * ldw + i + fetch.ahead);
    line(w + i, ldw);
  }
  if (i < bytes) {
    alignas(64) char tail[NW * 64] = {};
    for (int j = 0; j < NW; j++) std::memcpy(tail + j * 64, w + j * ldw + i, static_cast<size_t>(bytes - i));
    line(tail, 64);
  }
  KT_UNROLL for (int r = 0; r < R; r++) {
    KT_UNROLL for (int j = 0; j < NW; j++)
      c[r * kDotRows + j] = acc[r][j];
  }
}

template <class Arithmetic, int NW>
KT_NOINLINE void dots_rows(int rows, const char* w, int64_t ldw, int64_t bytes, const float* x, F32* c, bool accumulate,
                           FetchRows fetch) {
  with_rows<kBlocking.dot_mr>(
      rows, [&]<int R>() KT_ALWAYS_INLINE_LAMBDA { dots<Arithmetic, R, NW>(w, ldw, bytes, x, c, accumulate, fetch); });
}

// All rows of x by rows [n, n + NW) of W.
template <class Arithmetic, int NW>
KT_INLINE void dot_block(const Problem& p, int tiles, const float* x, F32* c, int64_t n) {
  constexpr int64_t kX = kLineVectors<Arithmetic> * kLanes;  // of a line and row of x
  const int64_t row_bytes = p.k * Arithmetic::kLaneBytes / Arithmetic::kPer, x_row = line_count<Arithmetic>(p.k) * kX;
  const char* w = static_cast<const char*>(p.w) + n * p.ldw;
  const bool cold = p.n * p.ldw > kDotCached;
  const int64_t chunks = row_bytes < kDotChunk ? 1 : (row_bytes + kDotChunk / 2) / kDotChunk;  // even ones
  const int64_t chunk = ceil_div(ceil_div(row_bytes, chunks), 64) * 64;
  const Parts parts(p.m, tiles);
  for (int64_t o = 0; o < row_bytes; o += chunk) {
    const int64_t ahead = o + chunk < row_bytes ? chunk : NW * p.ldw - o;
    for (int t = 0; t < tiles; t++) {
      const int64_t row = parts.begin(t), rows = parts.count(t);
      dots_rows<Arithmetic, NW>(static_cast<int>(rows), w + o, p.ldw, min_of(chunk, row_bytes - o),
                                x + row * x_row + o / 64 * rows * kX, c + row * kDotRows, o > 0,
                                {NW * t / tiles, cold ? NW * (t + 1) / tiles : 0, ahead});
    }
  }
  for (int64_t m = 0; m < p.m; m++) {
    float y[NW];
    if constexpr (NW == 4) {
      sum4(c + m * kDotRows, y);
    } else {
      KT_UNROLL for (int j = 0; j < NW; j++)
        y[j] = sum(c[m * kDotRows + j]);
    }
    store_outputs<NW>(p, m, n, y, NW);
  }
}

// Tiles [begin, end) of x, padded to `vectors` a row.
template <class Lane>
KT_INLINE void prepare_dots(const Problem& p, const Plan& plan, int64_t vectors, float* out, int64_t begin,
                            int64_t end) {
  const int64_t whole = p.k / Lane::kPer, lanes = ceil_div(p.k, Lane::kPer);
  const Parts tiles(p.m, plan.tiles);
  for (int64_t t = begin; t < end; t++) {
    const int64_t row = tiles.begin(t), rows = tiles.count(t);
    for (int64_t r = 0; r < rows; r++) {
      float* o = out + (row * vectors + r) * kLanes;
      for (int64_t k = 0; k < vectors * kLanes; k += kLanes, o += rows * kLanes) {
        if (k + kLanes <= whole) {
          store(o, Lane::load_x(p, row + r, k));
        } else {
          store(o, zero());
          for (int64_t i = k; i < lanes; i++) o[i - k] = Lane::x_lane(p, row + r, i);
        }
      }
    }
  }
}

// ---------------------------------------------------------------- the interface

template <class Arithmetic>
KT_INLINE Problem in_lanes(Problem p) {
  p.k = ceil_div(p.k, Arithmetic::kPer);
  return p;
}

static Plan sgemm_plan(const Problem& p, int threads) {
  Plan plan{};
  with_arithmetic(p, [&]<class Arithmetic>() {
    if (p.m <= kBlocking.dot_max) {
      plan.path = kDots;
      plan.tiles = static_cast<int>(ceil_div(p.m, kBlocking.dot_mr));
      plan.activation_bytes = p.m * line_count<Arithmetic>(p.k) * kLineVectors<Arithmetic> * kLanes * 4;
      plan.scratch_bytes = p.m * kDotRows * static_cast<int64_t>(sizeof(F32));
      plan.prepare_units = plan.tiles;
      plan.compute_units = ceil_div(p.n, kDotRows);
    } else {
      plan.path = kPanels;
      plan_gemm_f32<FloatRows<Arithmetic>>(plan, in_lanes<Arithmetic>(p), threads, kBlocking.kc, 64);
    }
  });
  return plan;
}
static bool sgemm_prepare(const Problem& p, const Plan& plan, void* activations, int64_t begin, int64_t end) {
  float* out = static_cast<float*>(activations);
  auto prepare = [&]<class Lane>() {
    if (plan.path == kDots)
      prepare_dots<Lane>(p, plan, plan.activation_bytes / (p.m * kLanes * 4), out, begin, end);
    else
      pack_x_f32<Lane>(p, plan, out, begin, end);
  };
#ifdef KT_HAS_BF16_DOT
  if (pairs(p)) return prepare.template operator()<Pairs>(), true;
#endif
  prepare.template operator()<Fp32>();
  return true;
}
static void sgemm_compute(const Problem& p, const Plan& plan, const void* activations, void* scratch, int64_t begin,
                          int64_t end) {
  with_arithmetic(p, [&]<class Arithmetic>() {
    const float* x = static_cast<const float*>(activations);
    if (plan.path == kPanels)
      return gemm(in_lanes<Arithmetic>(p), plan,
                  KernelF32<FloatRows<Arithmetic>, typename Arithmetic::Lane>{plan, {p}, p.n}, x, scratch, begin, end);
    F32* c = static_cast<F32*>(scratch);
    for (int64_t unit = begin; unit < end; unit++) {
      int64_t n = unit * kDotRows;
      if (n + kDotRows <= p.n)
        dot_block<Arithmetic, kDotRows>(p, plan.tiles, x, c, n);
      else
        for (; n < p.n; n++) dot_block<Arithmetic, 1>(p, plan.tiles, x, c, n);
    }
  });
}

extern const Kernels sgemm;
constinit const Kernels sgemm{sgemm_plan, sgemm_prepare, sgemm_compute};

}  // namespace ktlinear::tinyblas::KT_TIER
