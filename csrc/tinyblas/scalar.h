// Scalar helpers of one tier. They live in the tier's namespace: an inline function shared between tiers could be
// compiled with AVX-512 in one file and called from another.
#pragma once

#include <cstdint>
#include <cstring>

#include "tinyblas.h"

#define KT_INLINE inline __attribute__((always_inline))
#define KT_NOINLINE __attribute__((noinline))
#define KT_ALWAYS_INLINE_LAMBDA __attribute__((always_inline))
#define KT_UNROLL _Pragma("GCC unroll 32")

namespace ktlinear::tinyblas::KT_TIER {

// Integer sums of the int8 mode start at the bits of this float; see int8.h.
inline constexpr int32_t kMagicBits = 0x4B400000;
inline constexpr float kMagic = 12582912.f;

template <class T>
KT_INLINE constexpr T min_of(T a, T b) {
  return a < b ? a : b;
}

template <class To, class From>
KT_INLINE To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
template <class T>
KT_INLINE T load_as(const void* p) {
  T t;
  std::memcpy(&t, p, sizeof t);
  return t;
}

// f.template operator()<S>() for S = BEGIN .. END - 1, by default the eight steps of a group.
template <int BEGIN = 0, int END = 8, class F>
KT_INLINE void for_steps(F f) {
  if constexpr (BEGIN < END) {
    f.template operator()<BEGIN>();
    for_steps<BEGIN + 1, END>(f);
  }
}

// No subnormal fp32 takes part, so the result does not depend on the caller's flush-to-zero mode.
KT_INLINE float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, magnitude = h & 0x7FFFu;
  if (magnitude < 0x0400u) return bits_as<float>(sign | bits_as<uint32_t>(static_cast<float>(magnitude) * 0x1p-24f));
  const uint32_t rebias = magnitude < 0x7C00u ? 0x38000000u : 0x70000000u;  // exponent 31 becomes 255
  return bits_as<float>(sign | ((magnitude << 13) + rebias));
}
KT_INLINE uint16_t float_to_half(float f) {  // round to nearest even
  const uint32_t bits = bits_as<uint32_t>(f), sign = bits >> 16 & 0x8000u, a = bits & 0x7FFFFFFFu;
  if (a > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u | (a >> 13 & 0x3FFu));  // NaN stays a NaN
  if (a >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);                      // rounds to 65536 or more
  if (a <
      0x38800000u) {  // subnormal half: adding 0.5 leaves the value in the low mantissa bits, rounded to nearest even
    return static_cast<uint16_t>(sign | (bits_as<uint32_t>(bits_as<float>(a) + 0.5f) - 0x3F000000u));
  }
  return static_cast<uint16_t>(sign | ((a + 0xFFFu + (a >> 13 & 1u) - 0x38000000u) >> 13));
}
KT_INLINE float bf16_to_float(uint16_t b) { return bits_as<float>(static_cast<uint32_t>(b) << 16); }
KT_INLINE uint16_t float_to_bf16(float f) {  // round to nearest even
  const uint32_t bits = bits_as<uint32_t>(f);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);
  return static_cast<uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

// 1 / d; 0 for a zero or subnormal d, whose inverse may be infinite. As an fp16 scale such a d is 0, so no code counts.
KT_INLINE float inverse_of_scale(float d) { return __builtin_fabsf(d) >= 0x1p-126f ? 1.f / d : 0.f; }

// Element i of a float tensor of any of the three types.
KT_INLINE float load_element(const void* p, Type t, int64_t i) {
  if (t == Type::F32) return load_as<float>(static_cast<const float*>(p) + i);
  const uint16_t h = load_as<uint16_t>(static_cast<const uint16_t*>(p) + i);
  return t == Type::F16 ? half_to_float(h) : bf16_to_float(h);
}
KT_INLINE void store_element(void* p, Type t, int64_t i, float v) {
  if (t == Type::F32)
    static_cast<float*>(p)[i] = v;
  else
    static_cast<uint16_t*>(p)[i] = t == Type::F16 ? float_to_half(v) : float_to_bf16(v);
}
KT_INLINE constexpr int element_bytes(Type t) { return t == Type::F32 ? 4 : 2; }

// f.template operator()<R>() with R = rows, 1 <= rows <= MAX <= 8: the way from a run-time count to a micro-kernel.
template <int MAX, class F>
KT_INLINE void with_rows(int rows, F f) {
  switch (rows) {
#define KT_CASE(R) \
  case R:          \
    if constexpr (R <= MAX) return f.template operator()<R>();
    KT_CASE(1)
    KT_CASE(2)
    KT_CASE(3)
    KT_CASE(4)
    KT_CASE(5)
    KT_CASE(6)
    KT_CASE(7)
    KT_CASE(8)
#undef KT_CASE
  }
}

// Keeps what follows, and depends on p, from being moved before what precedes.
KT_INLINE void opaque(const uint8_t*& p) { asm volatile("" : "+r"(p)); }
KT_INLINE void prefetch_l1(const void* p) { __builtin_prefetch(p, 0, 3); }
KT_INLINE void prefetch_write(const void* p) { __builtin_prefetch(p, 1, 3); }
KT_INLINE void prefetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace ktlinear::tinyblas::KT_TIER
