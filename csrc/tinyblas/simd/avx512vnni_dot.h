// int8 products with vpdpbusd, zmm.
#pragma once

#include "avx512.h"

#define KT_VEX ""

namespace ktlinear::tinyblas::KT_TIER {

// The embedded broadcast makes one micro-fused uop of it.
KT_INLINE I32 dot(I32 acc, I32 w, const void* x) {
  asm volatile("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(*static_cast<const int32_t*>(x)));
  return acc;
}
KT_INLINE I32 dot_pairs(I32 acc, I32 w, const void* x) {
  asm volatile("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(*static_cast<const int32_t*>(x)));
  return acc;
}

}  // namespace ktlinear::tinyblas::KT_TIER

#include "vnni_dot.h"
