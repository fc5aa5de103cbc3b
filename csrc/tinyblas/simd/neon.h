// Four lanes of NEON (ARMv8.0), the vectors of every Arm tier. See portable.h for what each name does.
#pragma once

#include <arm_neon.h>

#include "../scalar.h"

namespace ktlinear::tinyblas::KT_TIER {

inline constexpr int kLanes = 4;
using F32 = float32x4_t;
using I32 = int32x4_t;

KT_INLINE F32 zero() { return vdupq_n_f32(0); }
KT_INLINE F32 set1(float v) { return vdupq_n_f32(v); }
KT_INLINE F32 load(const float* p) { return vld1q_f32(p); }
KT_INLINE void store(float* p, F32 v) { vst1q_f32(p, v); }
KT_INLINE void store_n(float* p, F32 v, int n) {
  if (n >= 4) return store(p, v);
  for (int i = 0; i < n; i++) p[i] = v[i];
}
KT_INLINE F32 load_f16(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
KT_INLINE F32 load_bf16(const uint16_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
KT_INLINE void store_f16(uint16_t* p, F32 v) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(v))); }
KT_INLINE void store_bf16(uint16_t* p, F32 v) {
  const uint32x4_t bits = vreinterpretq_u32_f32(v), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7FFF)));
  const uint32x4_t nan = vorrq_u32(bits, vdupq_n_u32(0x400000));
  vst1_u16(p, vshrn_n_u32(vbslq_u32(vceqq_f32(v, v), rounded, nan), 16));
}
KT_INLINE F32 add(F32 a, F32 b) { return vaddq_f32(a, b); }
KT_INLINE F32 sub(F32 a, F32 b) { return vsubq_f32(a, b); }
KT_INLINE F32 mul(F32 a, F32 b) { return vmulq_f32(a, b); }
KT_INLINE F32 fma(F32 a, F32 b, F32 c) { return vfmaq_f32(c, a, b); }
KT_INLINE F32 sqrt_of(F32 v) { return vsqrtq_f32(v); }
KT_INLINE float sum(F32 v) {
  const float32x2_t pair = vadd_f32(vget_low_f32(v), vget_high_f32(v));
  return vaddv_f32(pair);
}
KT_INLINE void transpose(F32 (&r)[4]) {
  float64x2_t even[2], odd[2];  // two lanes each: of columns 0 and 2, of columns 1 and 3
  KT_UNROLL for (int i = 0; i < 2; i++) {
    even[i] = vreinterpretq_f64_f32(vtrn1q_f32(r[2 * i], r[2 * i + 1]));
    odd[i] = vreinterpretq_f64_f32(vtrn2q_f32(r[2 * i], r[2 * i + 1]));
  }
  r[0] = vreinterpretq_f32_f64(vtrn1q_f64(even[0], even[1]));
  r[1] = vreinterpretq_f32_f64(vtrn1q_f64(odd[0], odd[1]));
  r[2] = vreinterpretq_f32_f64(vtrn2q_f64(even[0], even[1]));
  r[3] = vreinterpretq_f32_f64(vtrn2q_f64(odd[0], odd[1]));
}
KT_INLINE void sum4(const F32* v, float* out) {
  F32 t[4] = {v[0], v[1], v[2], v[3]};
  transpose(t);
  store(out, add(add(t[0], t[2]), add(t[1], t[3])));
}

KT_INLINE I32 load_i(const void* p) { return vreinterpretq_s32_u8(vld1q_u8(static_cast<const uint8_t*>(p))); }
KT_INLINE void store_i(void* p, I32 v) { vst1q_u8(static_cast<uint8_t*>(p), vreinterpretq_u8_s32(v)); }
KT_INLINE I32 splat_i32(int32_t v) { return vdupq_n_s32(v); }
KT_INLINE I32 splat_i8(uint8_t v) { return vreinterpretq_s32_u8(vdupq_n_u8(v)); }
KT_INLINE I32 band(I32 a, I32 b) { return vandq_s32(a, b); }
KT_INLINE I32 bor(I32 a, I32 b) { return vorrq_s32(a, b); }
KT_INLINE I32 bxor(I32 a, I32 b) { return veorq_s32(a, b); }
KT_INLINE I32 and_or(I32 a, I32 b, I32 c) { return bor(band(a, b), c); }
// Operators and not vshrq_n: N may be 0, for which there is no such instruction.
template <int N>
KT_INLINE I32 shift_right_16(I32 v) {
  return vreinterpretq_s32_u16(vreinterpretq_u16_s32(v) >> N);
}
template <int N>
KT_INLINE I32 shift_left_16(I32 v) {
  return vreinterpretq_s32_u16(vreinterpretq_u16_s32(v) << N);
}
template <int N>
KT_INLINE I32 shift_right_32(I32 v) {
  return vreinterpretq_s32_u32(vreinterpretq_u32_s32(v) >> N);
}
template <int N>
KT_INLINE I32 shift_left_32(I32 v) {
  return vreinterpretq_s32_u32(vreinterpretq_u32_s32(v) << N);
}
KT_INLINE I32 shift_right_32(I32 v, int n) {
  return vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(v), vdupq_n_s32(-n)));
}
KT_INLINE I32 add_i16(I32 a, I32 b) {
  return vreinterpretq_s32_s16(vaddq_s16(vreinterpretq_s16_s32(a), vreinterpretq_s16_s32(b)));
}
KT_INLINE I32 mul_low_16(I32 a, I32 b) {
  return vreinterpretq_s32_s16(vmulq_s16(vreinterpretq_s16_s32(a), vreinterpretq_s16_s32(b)));
}
KT_INLINE I32 table16(const uint8_t* t) { return load_i(t); }
KT_INLINE I32 lookup16(I32 table, I32 index) {
  return vreinterpretq_s32_u8(vqtbl1q_u8(vreinterpretq_u8_s32(table), vreinterpretq_u8_s32(index)));
}
KT_INLINE uint8x8_t load_four(const uint8_t* p) { return vcreate_u8(load_as<uint32_t>(p)); }
KT_INLINE I32 load_u8(const uint8_t* p) {
  return vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(vmovl_u8(load_four(p)))));
}
KT_INLINE I32 load_s8(const uint8_t* p) { return vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(load_four(p))))); }
KT_INLINE void store_low_16(uint8_t* p, I32 v) { vst1_u8(p, vreinterpret_u8_s16(vmovn_s32(v))); }
KT_INLINE void store_low_8(uint8_t* p, I32 v) {
  const int16x4_t low = vmovn_s32(v);
  const uint32_t four = vget_lane_u32(vreinterpret_u32_s8(vmovn_s16(vcombine_s16(low, low))), 0);
  std::memcpy(p, &four, 4);
}
KT_INLINE void store_bytes(uint8_t* p, I32 v) {
  alignas(16) static constexpr uint8_t columns[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
  const I32 bytes = lookup16(v, load_i(columns));
  KT_UNROLL for (int j = 0; j < 4; j++) {
    const int32_t four = bytes[j];
    std::memcpy(p + j * 16, &four, 4);
  }
}
KT_INLINE F32 as_f32(I32 v) { return vreinterpretq_f32_s32(v); }
KT_INLINE I32 as_i32(F32 v) { return vreinterpretq_s32_f32(v); }
KT_INLINE void load_words(const uint8_t* p, int64_t stride, I32 (&w)[4]) {
  F32 rows[4];
  KT_UNROLL for (int r = 0; r < 4; r++)
    rows[r] = as_f32(load_i(p + r * stride));
  transpose(rows);
  KT_UNROLL for (int j = 0; j < 4; j++)
    w[j] = as_i32(rows[j]);
}
KT_INLINE I32 greater_i32(I32 a, I32 b) { return vreinterpretq_s32_u32(vcgtq_s32(a, b)); }
KT_INLINE I32 max_i32(I32 a, I32 b) { return vmaxq_s32(a, b); }
KT_INLINE I32 add_i32(I32 a, I32 b) { return vaddq_s32(a, b); }
KT_INLINE F32 to_f32(I32 v) { return vcvtq_f32_s32(v); }
template <int J>
KT_INLINE I32 byte(I32 v) {
  return J == 3 ? shift_right_32<24>(v) : band(shift_right_32<8 * J>(v), splat_i32(255));
}

// For the quantization of activations.
KT_INLINE int32_t max_lane(I32 v) { return vmaxvq_s32(v); }
KT_INLINE int32_t sum_lanes(I32 v) { return vaddvq_s32(v); }
KT_INLINE I32 round_i32(F32 v) { return vcvtnq_s32_f32(v); }
KT_INLINE void store_i8(int8_t* p, I32 v) { store_low_8(reinterpret_cast<uint8_t*>(p), v); }

}  // namespace ktlinear::tinyblas::KT_TIER
