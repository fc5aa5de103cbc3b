// Compile-time dispatch: the one place that tests __AVX512F__ and its kin.
//
// A single-tier build (KTLINEAR_ISA=native or one tier's name) compiles this header with that tier's flags and gets
// exactly one tier, the best that the flags allow. An `all` build defines KT_ALL_TIERS and lists every tier of the
// architecture, best first; the best one that the CPU has is chosen once at load (csrc/ops/dispatch.cpp).
#pragma once

#include "tinyblas.h"

#define KT_DECLARE_TIER(name)          \
  namespace ktlinear::tinyblas::name { \
  extern const Kernels sgemm, mixmul;  \
  extern const Codec codec;            \
  extern const Limits limits;          \
  extern Quantize quantize;            \
  }
// Quantizers are compiled once per vector width, for the first tier that has it (ktlinear/_cpu.py: quantizer).
// `unsupported` has four lanes, as NEON.
#define KT_TIER_ROW(name, quantizer) KT_TIER_ROW_WITH(name, name, quantizer)
// A tier whose kernels for quantized weights are another's (ktlinear/_cpu.py: mixmul).
#define KT_TIER_ROW_WITH(name, other, quantizer) \
  {#name, &name::sgemm, &other::mixmul, &other::codec, quantizer::quantize, &name::limits}
// Its bf16 products serve float weights alone.
#define KT_ZEN4_ROW KT_TIER_ROW_WITH(amd_zen4, amd_avx512vnni, amd_avx512f)

KT_DECLARE_TIER(unsupported)
#if defined(__x86_64__) || defined(_M_X64)
KT_DECLARE_TIER(amd_avx)
KT_DECLARE_TIER(amd_fma)
KT_DECLARE_TIER(amd_avx2)
KT_DECLARE_TIER(amd_avxvnni)
KT_DECLARE_TIER(amd_avx512f)
KT_DECLARE_TIER(amd_avx512vnni)
KT_DECLARE_TIER(amd_zen4)
#elif defined(__aarch64__)
KT_DECLARE_TIER(arm80)
KT_DECLARE_TIER(arm82)
KT_DECLARE_TIER(arm86)
#endif

namespace ktlinear::tinyblas {

// Rows of the table of tiers, best first.
#if defined(KT_ALL_TIERS)
#if defined(__x86_64__) || defined(_M_X64)
#define KT_TIERS                                                                                        \
  KT_ZEN4_ROW, KT_TIER_ROW(amd_avx512vnni, amd_avx512f), KT_TIER_ROW(amd_avx512f, amd_avx512f),         \
      KT_TIER_ROW(amd_avxvnni, amd_avx), KT_TIER_ROW(amd_avx2, amd_avx), KT_TIER_ROW(amd_fma, amd_avx), \
      KT_TIER_ROW(amd_avx, amd_avx), KT_TIER_ROW(unsupported, unsupported)
#elif defined(__aarch64__)
#define KT_TIERS                                                                                     \
  KT_TIER_ROW(arm86, unsupported), KT_TIER_ROW(arm82, unsupported), KT_TIER_ROW(arm80, unsupported), \
      KT_TIER_ROW(unsupported, unsupported)
#else
#define KT_TIERS KT_TIER_ROW(unsupported, unsupported)
#endif
#elif defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#if defined(__AVX512VNNI__) && defined(__AVX512BF16__)
#define KT_TIERS KT_ZEN4_ROW
#elif defined(__AVX512VNNI__)
#define KT_TIERS KT_TIER_ROW(amd_avx512vnni, amd_avx512f)
#else
#define KT_TIERS KT_TIER_ROW(amd_avx512f, amd_avx512f)
#endif
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#if defined(__AVXVNNI__)
#define KT_TIERS KT_TIER_ROW(amd_avxvnni, amd_avx)
#else
#define KT_TIERS KT_TIER_ROW(amd_avx2, amd_avx)
#endif
#elif defined(__AVX__) && defined(__FMA__) && defined(__F16C__)
#define KT_TIERS KT_TIER_ROW(amd_fma, amd_avx)
#elif defined(__AVX__)
#define KT_TIERS KT_TIER_ROW(amd_avx, amd_avx)
#elif defined(__aarch64__) && !defined(KT_PORTABLE)  // every compiler has NEON on, so `unsupported` has to ask
#if defined(__ARM_FEATURE_DOTPROD) && defined(__ARM_FEATURE_MATMUL_INT8)
#define KT_TIERS KT_TIER_ROW(arm86, unsupported)
#elif defined(__ARM_FEATURE_DOTPROD)
#define KT_TIERS KT_TIER_ROW(arm82, unsupported)
#else
#define KT_TIERS KT_TIER_ROW(arm80, unsupported)
#endif
#else
#define KT_TIERS KT_TIER_ROW(unsupported, unsupported)
#endif

}  // namespace ktlinear::tinyblas
