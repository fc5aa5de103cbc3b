// The pieces that packed layouts are made of. A group is 32 elements of 16 rows, step s its elements 4s..4s+3.
//
//   nibbles   4 x 64 bytes [row][4]: the low nibbles of quarter j are step j, the high ones step j + 4
//   crumbs    2 x 64 bytes [row][4]: bits 2i, 2i + 1 of half j are step 4j + i
//   bits      1 x 64 bytes [row][4]: bit s is step s
#pragma once

#include "../epilogue.h"

namespace ktlinear::tinyblas::KT_TIER {

inline constexpr int kVectorBytes = kLanes * 4;

// N > 0: to the left, N < 0: to the right, of 16-bit units.
template <int N>
KT_INLINE I32 shift_16(I32 v) {
  if constexpr (N > 0) return shift_left_16<N>(v);
  if constexpr (N < 0) return shift_right_16<-N>(v);
  return v;
}

template <int S>
KT_INLINE I32 nibble(const uint8_t* group, int v) {
  return band(shift_16 < S<4 ? 0 : -4>(load_i(group + S % 4 * 64 + v * kVectorBytes)), splat_i8(15));
}
// Two bits of step S, moved to bits TO and TO + 1.
template <int S, int TO>
KT_INLINE I32 crumb(const uint8_t* group, int v) {
  return band(shift_16<TO - S % 4 * 2>(load_i(group + S / 4 * 64 + v * kVectorBytes)), splat_i8(3 << TO));
}
// The bit of step S, moved to bit TO.
template <int S, int TO>
KT_INLINE I32 bit(const uint8_t* group, int v) {
  return band(shift_16<TO - S>(load_i(group + v * kVectorBytes)), splat_i8(1 << TO));
}
KT_INLINE F32 load_halves(const uint8_t* p, int v) {
  return load_f16(reinterpret_cast<const uint16_t*>(p) + v * kLanes);
}

// One row's 32 bits (bit e: element e) <-> its four bytes of a bit plane: a transpose of 8 x 4 bits.
KT_INLINE void put_bits(uint8_t* out, uint32_t bits) {
  KT_UNROLL for (int i = 0; i < 4; i++) {
    uint32_t b = 0;
    KT_UNROLL for (int s = 0; s < 8; s++) b |= (bits >> (4 * s + i) & 1u) << s;
    out[i] = static_cast<uint8_t>(b);
  }
}
KT_INLINE uint32_t get_bits(const uint8_t* in) {
  uint32_t bits = 0;
  KT_UNROLL for (int i = 0; i < 4; i++) KT_UNROLL for (int s = 0; s < 8; s++) bits |= (in[i] >> s & 1u) << (4 * s + i);
  return bits;
}

}  // namespace ktlinear::tinyblas::KT_TIER
