// Quantized weights, packed or as plain GGUF rows. Plain rows are packed slice by slice into scratch and then take the
// same way, so both give the same bits.
//
//   exact    W decoded to fp32 panels, x as it is: the fp32 GEMM. The only way on tiers without a fast integer product.
//   direct   small M: x quantized per 32, W decoded in registers (int8.h)
//   int8     large M: x quantized per 32, W decoded to int8 panels (int8.h)
#pragma once

#include "gemm_f32.h"
#include "records.h"
#ifdef KT_HAS_DOT  // simd/*_dot.h: the tier has an int8 product worth using
#include "int8.h"
#endif
#ifdef KT_HAS_MADDUBS  // it is without VNNI
#include "maddubs.h"
#endif

namespace ktlinear::tinyblas::KT_TIER {

// ---------------------------------------------------------------- exact

inline constexpr int kExactKC = 256;  // a multiple of every format's record

template <class D>
struct DecodedRows {
  Records<D> records;

  // 64 bytes of a step are [16 rows][4 k]: byte j of each 32-bit lane is one k of all rows, ready to be converted.
  void fill(int64_t n, int vectors, int64_t k, int64_t kc, float* panel) const {
    alignas(64) uint8_t scratch[2 * kExactKC / Records<D>::kK * D::kRecordBytes];  // a slice is below 2 * kExactKC
    const uint8_t* record = nullptr;
    for (int i = 0; i < vectors; i++, n += kLanes, panel += kLanes) {
      const int v = static_cast<int>(n % kPanelRows) / kLanes;
      if (v == 0 || !record) record = records.get(n - n % kPanelRows, k, kc, scratch);
      for (int64_t g = 0; g < kc / 32; g++)
        decode(record + g / D::kGroups * D::kRecordBytes, static_cast<int>(g % D::kGroups), v, panel + g * 32 * kNR);
    }
  }
  NextSlice next(int64_t n, int64_t k, int64_t kc) const { return records.next(n, k, kc, ceil_div(kNR, kPanelRows)); }

 private:
  KT_INLINE static void decode(const uint8_t* record, int group, int v, float* out) {
    F32 scale[D::kScales], minimum[D::kScales];
    KT_UNROLL for (int h = 0; h < D::kScales; h++) {
      scale[h] = D::scale(record, group, h, v);
      if constexpr (D::kHasMinimum) minimum[h] = D::minimum(record, group, h, v);
    }
    const F32 offset = set1(static_cast<float>(D::kOffset));
    for_steps([&]<int S>() KT_ALWAYS_INLINE_LAMBDA {
      const I32 code = D::template code<S>(record, group, v);
      auto one = [&](I32 byte_j, int j) KT_ALWAYS_INLINE_LAMBDA {
        const F32 u = to_f32(byte_j);
        constexpr int h = S * D::kScales / 8;
        const F32 w = D::kHasMinimum ? fma(u, scale[h], minimum[h]) : mul(sub(u, offset), scale[h]);
        store(out + (S * 4 + j) * kNR, w);
      };
      one(byte<0>(code), 0), one(byte<1>(code), 1), one(byte<2>(code), 2), one(byte<3>(code), 3);
    });
  }
};

// ---------------------------------------------------------------- the interface

static Plan mixmul_plan(const Problem& p, int threads) {
  Plan plan{};
#ifdef KT_HAS_DOT
  if (!p.exact) {
    with_decoder(p.w_type, [&]<class D>() {
      using View = typename IntegerView<D>::type;
      plan_int8<View, PanelFor<View>>(plan, p, threads);
    });
    return plan;
  }
#endif
  plan.path = kExact;
  plan_gemm_f32<DecodedRows<Q8_0>>(plan, p, threads, kExactKC, kExactKC);
  return plan;
}
static bool mixmul_prepare(const Problem& p, const Plan& plan, void* activations, int64_t begin, int64_t end) {
#ifdef KT_HAS_DOT
  if (plan.path != kExact)
    return with_decoder(p.w_type, [&]<class D>() {
      return quantize_x<typename IntegerView<D>::type>(p, plan, static_cast<uint8_t*>(activations), begin, end);
    });
#endif
  pack_x_f32(p, plan, static_cast<float*>(activations), begin, end);
  return true;
}
static void mixmul_compute(const Problem& p, const Plan& plan, const void* activations, void* scratch, int64_t begin,
                           int64_t end) {
  with_decoder(p.w_type, [&]<class D>() {
#ifdef KT_HAS_DOT
    using View = typename IntegerView<D>::type;
    if (plan.path == kDirect)
      return direct<View>(p, plan, static_cast<const uint8_t*>(activations), scratch, begin, end);
    if (plan.path == kInt8)
      return gemm(p, plan, KernelInt8<View, PanelFor<View>>{p, plan, {p}}, activations, scratch, begin, end);
#endif
    gemm(p, plan, KernelF32<DecodedRows<D>>{plan, {{p}}, p.n}, activations, scratch, begin, end);
  });
}

extern const Kernels mixmul;
constinit const Kernels mixmul{mixmul_plan, mixmul_prepare, mixmul_compute};

}  // namespace ktlinear::tinyblas::KT_TIER
