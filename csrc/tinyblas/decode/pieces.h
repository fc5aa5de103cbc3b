// The pieces that packed layouts are made of. A group is 32 elements of 16 rows, step s its elements 4s..4s+3.
//
//   nibbles   4 x 64 bytes [row][4]: the low nibbles of quarter j are step j, the high ones step j + 4
//   crumbs    2 x 64 bytes [row][4]: bits 2i, 2i + 1 of half j are step 4j + i
//   bits      1 x 64 bytes [row][4]: bit s is step s
#pragma once

#include "rows.h"

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
template <int S>
KT_INLINE I32 crumb(const uint8_t* group, int v) {
  return band(shift_16<-(S % 4 * 2)>(load_i(group + S / 4 * 64 + v * kVectorBytes)), splat_i8(3));
}
// The two bits of step S at TO and TO + 1, its bit at TO, or'ed to the bits below.
template <int S, int TO>
KT_INLINE I32 or_crumb(I32 below, const uint8_t* group, int v) {
  return and_or(shift_16<TO - S % 4 * 2>(load_i(group + S / 4 * 64 + v * kVectorBytes)), splat_i8(3 << TO), below);
}
template <int S, int TO>
KT_INLINE I32 or_bit(I32 below, const uint8_t* group, int v) {
  return and_or(shift_16<TO - S>(load_i(group + v * kVectorBytes)), splat_i8(1 << TO), below);
}
KT_INLINE I32 twice(I32 v) {  // the low 16 bits of each lane in both its halves
  alignas(16) static constexpr uint8_t order[16] = {0, 1, 0, 1, 4, 5, 4, 5, 8, 9, 8, 9, 12, 13, 12, 13};
  return lookup16(v, table16(order));
}
KT_INLINE F32 load_halves(const uint8_t* p, int v) {
  return load_f16(reinterpret_cast<const uint16_t*>(p) + v * kLanes);
}

// 32 bits (bit e: element e) <-> the four bytes of a bit plane: bit 4s + i <-> bit 8i + s, a rotation of the bits of
// the index.
template <class Rows>
KT_INLINE auto to_planes(typename Rows::W w) {
  w = swap_bits<1>(w, Rows::all(0x22222222));
  w = swap_bits<3>(w, Rows::all(0x0A0A0A0A));
  w = swap_bits<6>(w, Rows::all(0x00CC00CC));
  return swap_bits<12>(w, Rows::all(0x0000F0F0));
}
KT_INLINE uint32_t from_planes(uint32_t w) {
  w = swap_bits<12>(w, 0x0000F0F0u);
  w = swap_bits<6>(w, 0x00CC00CCu);
  w = swap_bits<3>(w, 0x0A0A0A0Au);
  return swap_bits<1>(w, 0x22222222u);
}

}  // namespace ktlinear::tinyblas::KT_TIER
