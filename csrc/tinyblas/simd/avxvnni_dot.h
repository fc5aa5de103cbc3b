// int8 products with vpdpbusd, ymm (VEX encoding).
#pragma once

#include "avx2_int.h"

#define KT_VEX "%{vex%} "

namespace ktlinear::tinyblas::KT_TIER {

KT_INLINE I32 dot(I32 acc, I32 w, const void* x) {
  return _mm256_dpbusd_avx_epi32(acc, w, _mm256_set1_epi32(load_as<int32_t>(x)));
}
KT_INLINE I32 dot_pairs(I32 acc, I32 w, const void* x) {
  return _mm256_dpwssd_avx_epi32(acc, w, _mm256_set1_epi32(load_as<int32_t>(x)));
}

}  // namespace ktlinear::tinyblas::KT_TIER

#include "vnni_dot.h"
