// What this tier's instructions can do at most, for the roofline of the benchmarks.
#pragma once

#include "epilogue.h"

namespace ktlinear::tinyblas::KT_TIER {

inline constexpr int kChains = kLanes == 16 ? 24 : 12;  // enough to hide four to five cycles of latency on two ports

// One chain per sum; returns the sums' iterations.
template <class F>
static int64_t run_chains(int64_t iterations, F step) {
  F32 acc[kChains];  // different values, or the compiler merges the chains
  KT_UNROLL for (int i = 0; i < kChains; i++)
    acc[i] = set1(1.f + 0.01f * static_cast<float>(i));
  for (int64_t n = 0; n < iterations; n++) {
    KT_UNROLL for (int i = 0; i < kChains; i++)
      acc[i] = step(acc[i]);
  }
  F32 total = zero();
  KT_UNROLL for (int i = 0; i < kChains; i++)
    total = add(total, acc[i]);
  volatile float sink = sum(total);
  (void)sink;
  return iterations * kChains;
}
static int64_t limit_fma(int64_t iterations) {
  const F32 a = set1(0.999f), b = set1(0.001f);
  return kLanes * 2 * run_chains(iterations, [&](F32 sum) KT_ALWAYS_INLINE_LAMBDA { return fma(sum, a, b); });
}
static int64_t limit_bf16(int64_t iterations) {
#ifdef KT_HAS_BF16_DOT
  const F32 a = as_f32(splat_i32(0x3F003F00)), b = as_f32(splat_i32(0x3A803A80));  // pairs of 0.5, of 2^-10
  return kLanes * 4 * run_chains(iterations, [&](F32 sum) KT_ALWAYS_INLINE_LAMBDA { return dot_bf16(a, b, sum); });
#else
  return 0 * iterations;
#endif
}
static int64_t limit_dot(int64_t iterations) {
#ifdef KT_HAS_DOT
  return dot_peak<kChains>(iterations);
#else
  return 0 * iterations;
#endif
}
static int64_t limit_read(const void* p, int64_t bytes) {
  const char* c = static_cast<const char*>(p);
  I32 acc[4] = {splat_i32(0), splat_i32(0), splat_i32(0), splat_i32(0)};
  for (int64_t i = 0; i + 256 <= bytes; i += 256) {  // four cache lines, fetched 4 KiB ahead
    KT_UNROLL for (int j = 0; j < 256; j += 64)
      prefetch_l1(c + i + j + 4096);
    KT_UNROLL for (int j = 0; j < 256; j += kLanes * 4)
      acc[j / (kLanes * 4) % 4] = bxor(acc[j / (kLanes * 4) % 4], load_i(c + i + j));
  }
  return load_as<int32_t>(&(acc[0] = bxor(bxor(acc[0], acc[1]), bxor(acc[2], acc[3]))));
}

extern const Limits limits;
constinit const Limits limits{limit_fma, limit_bf16, limit_dot, limit_read};

}  // namespace ktlinear::tinyblas::KT_TIER
