// The vector interface in portable C++ (GNU vector extensions, four lanes). It is the fallback for a CPU we know
// nothing about, and the oracle of the other tiers' tests.
//
// Every simd/*.h defines the same names in its tier's namespace:
//   kLanes                         fp32 lanes of a vector
//   F32, I32                       vectors of the same size; an I32 also holds 4 * kLanes bytes
//   zero, set1, load, store        unaligned; store_n stores the first n lanes only
//   load_f16, load_bf16, ...       16-bit floats <-> F32; stores round to nearest even
//   fma(a, b, c) = a * b + c       fused where the hardware can
//   sqrt_of(v)
//   transpose(rows)                kLanes x kLanes
//   sum(v), sum4(v, out)           horizontal, of one vector or of four, in the same order
//   load_i, splat_i8, splat_i32, band, bor, bxor, to_f32, byte<j> (byte j of each 32-bit lane)
//   shift_right_16<N>, shift_left_16<N>   of 16-bit units, zeros coming in
//   shift_right_32<N>(v), shift_right_32(v, n)   of 32-bit ones
//   shift_left_32<N>(v)
//   add_i32, max_i32, greater_i32  of 32-bit units, signed; greater: all ones or zero. as_f32(v), as_i32(v) the same bits
//   and_or(a, b, c) = (a & b) | c  one instruction where the hardware has it
//   add_i16                        of 16-bit units, wrapping
//   mul_low_16                     of 16-bit units: the product's low half
//   table16(t), lookup16(table, i) a table of 16 bytes, looked up with bytes below 16
//   load_u8, load_s8               kLanes bytes, widened to 32-bit lanes
//   store_i, store_low_8, store_low_16    all of a vector; the low 8, 16 bits of each lane
//   store_bytes(p, v)              byte j of lane r to p[16 * j + r]
//   load_words(p, stride, w)       16 bytes of kLanes rows -> four vectors of 32-bit words, a row per lane
// Tiers with an int8 product worth using add a simd/*_dot.h, which defines KT_HAS_DOT (see there).
#pragma once

#include "../scalar.h"

namespace ktlinear::tinyblas::KT_TIER {

inline constexpr int kLanes = 4;
typedef float F32 __attribute__((vector_size(16)));
typedef int32_t I32 __attribute__((vector_size(16)));
typedef uint32_t U32 __attribute__((vector_size(16)));
typedef uint16_t U16 __attribute__((vector_size(16)));

KT_INLINE F32 zero() { return F32{0, 0, 0, 0}; }
KT_INLINE F32 set1(float v) { return F32{v, v, v, v}; }
KT_INLINE F32 load(const float* p) { return load_as<F32>(p); }
KT_INLINE void store(float* p, F32 v) { std::memcpy(p, &v, sizeof v); }
KT_INLINE void store_n(float* p, F32 v, int n) {
  for (int i = 0; i < n; i++) p[i] = v[i];
}
KT_INLINE F32 load_f16(const uint16_t* p) {
  return F32{half_to_float(load_as<uint16_t>(p)), half_to_float(load_as<uint16_t>(p + 1)),
             half_to_float(load_as<uint16_t>(p + 2)), half_to_float(load_as<uint16_t>(p + 3))};
}
KT_INLINE F32 load_bf16(const uint16_t* p) {
  return F32{bf16_to_float(load_as<uint16_t>(p)), bf16_to_float(load_as<uint16_t>(p + 1)),
             bf16_to_float(load_as<uint16_t>(p + 2)), bf16_to_float(load_as<uint16_t>(p + 3))};
}
KT_INLINE void store_f16(uint16_t* p, F32 v) {
  KT_UNROLL for (int i = 0; i < 4; i++)
    p[i] = float_to_half(v[i]);
}
KT_INLINE void store_bf16(uint16_t* p, F32 v) {
  KT_UNROLL for (int i = 0; i < 4; i++)
    p[i] = float_to_bf16(v[i]);
}
KT_INLINE F32 add(F32 a, F32 b) { return a + b; }
KT_INLINE F32 sub(F32 a, F32 b) { return a - b; }
KT_INLINE F32 mul(F32 a, F32 b) { return a * b; }
KT_INLINE F32 fma(F32 a, F32 b, F32 c) { return a * b + c; }
KT_INLINE F32 sqrt_of(F32 v) {
  return F32{__builtin_sqrtf(v[0]), __builtin_sqrtf(v[1]), __builtin_sqrtf(v[2]), __builtin_sqrtf(v[3])};
}
KT_INLINE float sum(F32 v) { return (v[0] + v[2]) + (v[1] + v[3]); }
KT_INLINE void sum4(const F32* v, float* out) {
  KT_UNROLL for (int i = 0; i < 4; i++)
    out[i] = sum(v[i]);
}
KT_INLINE void transpose(F32 (&r)[4]) {
  F32 t[4];
  KT_UNROLL for (int i = 0; i < 4; i++)
    t[i] = F32{r[0][i], r[1][i], r[2][i], r[3][i]};
  KT_UNROLL for (int i = 0; i < 4; i++)
    r[i] = t[i];
}

KT_INLINE I32 load_i(const void* p) { return load_as<I32>(p); }
KT_INLINE I32 splat_i32(int32_t v) { return I32{v, v, v, v}; }
KT_INLINE I32 splat_i8(uint8_t v) { return splat_i32(static_cast<int32_t>(v * 0x01010101u)); }
KT_INLINE I32 band(I32 a, I32 b) { return a & b; }
KT_INLINE I32 bxor(I32 a, I32 b) { return a ^ b; }
template <int N>
KT_INLINE I32 shift_right_16(I32 v) {
  return reinterpret_cast<I32>(reinterpret_cast<U16>(v) >> N);
}
template <int N>
KT_INLINE I32 shift_left_16(I32 v) {
  return reinterpret_cast<I32>(reinterpret_cast<U16>(v) << N);
}
template <int N>
KT_INLINE I32 shift_left_32(I32 v) {
  return reinterpret_cast<I32>(reinterpret_cast<U32>(v) << N);
}
KT_INLINE I32 bor(I32 a, I32 b) { return a | b; }
KT_INLINE I32 and_or(I32 a, I32 b, I32 c) { return bor(band(a, b), c); }
typedef uint8_t U8 __attribute__((vector_size(16)));
KT_INLINE I32 table16(const uint8_t* t) { return load_i(t); }
KT_INLINE I32 lookup16(I32 table, I32 index) {
  const U8 t = reinterpret_cast<U8>(table), i = reinterpret_cast<U8>(index);
  U8 out{};
  KT_UNROLL for (int j = 0; j < 16; j++)
    out[j] = t[i[j]];
  return reinterpret_cast<I32>(out);
}
KT_INLINE I32 load_u8(const uint8_t* p) { return I32{p[0], p[1], p[2], p[3]}; }
KT_INLINE I32 load_s8(const uint8_t* p) {
  return I32{static_cast<int8_t>(p[0]), static_cast<int8_t>(p[1]), static_cast<int8_t>(p[2]),
             static_cast<int8_t>(p[3])};
}
template <int N>
KT_INLINE I32 shift_right_32(I32 v) {  // logical
  return reinterpret_cast<I32>(reinterpret_cast<U32>(v) >> N);
}
KT_INLINE I32 shift_right_32(I32 v, int n) { return reinterpret_cast<I32>(reinterpret_cast<U32>(v) >> n); }
KT_INLINE I32 add_i16(I32 a, I32 b) {
  return reinterpret_cast<I32>(reinterpret_cast<U16>(a) + reinterpret_cast<U16>(b));
}
KT_INLINE I32 mul_low_16(I32 a, I32 b) {
  return reinterpret_cast<I32>(reinterpret_cast<U16>(a) * reinterpret_cast<U16>(b));
}
KT_INLINE void store_i(void* p, I32 v) { std::memcpy(p, &v, sizeof v); }
KT_INLINE void store_low_8(uint8_t* p, I32 v) {
  KT_UNROLL for (int i = 0; i < 4; i++)
    p[i] = static_cast<uint8_t>(v[i]);
}
KT_INLINE void store_low_16(uint8_t* p, I32 v) {
  KT_UNROLL for (int i = 0; i < 4; i++) {
    const uint16_t low = static_cast<uint16_t>(v[i]);
    std::memcpy(p + i * 2, &low, 2);
  }
}
KT_INLINE void store_bytes(uint8_t* p, I32 v) {
  KT_UNROLL for (int j = 0; j < 4; j++) {
    KT_UNROLL for (int i = 0; i < 4; i++)
      p[j * 16 + i] = static_cast<uint8_t>(static_cast<uint32_t>(v[i]) >> (8 * j));
  }
}
KT_INLINE void load_words(const uint8_t* p, int64_t stride, I32 (&w)[4]) {
  KT_UNROLL for (int j = 0; j < 4; j++) {
    KT_UNROLL for (int r = 0; r < 4; r++)
      w[j][r] = load_as<int32_t>(p + r * stride + j * 4);
  }
}
KT_INLINE I32 greater_i32(I32 a, I32 b) { return a > b; }
KT_INLINE I32 max_i32(I32 a, I32 b) { return a > b ? a : b; }
KT_INLINE I32 add_i32(I32 a, I32 b) {
  return reinterpret_cast<I32>(reinterpret_cast<U32>(a) + reinterpret_cast<U32>(b));
}
KT_INLINE F32 as_f32(I32 v) { return reinterpret_cast<F32>(v); }
KT_INLINE I32 as_i32(F32 v) { return reinterpret_cast<I32>(v); }
KT_INLINE F32 to_f32(I32 v) { return __builtin_convertvector(v, F32); }
template <int J>
KT_INLINE I32 byte(I32 v) {
  return reinterpret_cast<I32>((reinterpret_cast<U32>(v) >> (8 * J)) & 255u);
}

}  // namespace ktlinear::tinyblas::KT_TIER
