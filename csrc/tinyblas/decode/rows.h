// GGUF blocks as 32-bit words, of one row or of a vector of rows at once: packing is written once, for both.
//
//   W                 a word: uint32_t, or an I32 with a row per lane
//   load(offset, w)   16 bytes of the block as four words; offset + 16 must lie within the block
//   all(v)            a constant
//   put(piece, w)     word -> [16 rows][4 bytes];   put_half, put_byte: its low 16, 8 bits -> [16 rows] of them
//   put_bytes         its four bytes -> 4 x [16 rows]
// and the operations band, bor, bxor, shift_left_32<N>, shift_right_32<N>.
#pragma once

#include "../epilogue.h"

namespace ktlinear::tinyblas::KT_TIER {

KT_INLINE uint32_t band(uint32_t a, uint32_t b) { return a & b; }
KT_INLINE uint32_t bor(uint32_t a, uint32_t b) { return a | b; }
KT_INLINE uint32_t bxor(uint32_t a, uint32_t b) { return a ^ b; }
template <int N>
KT_INLINE uint32_t shift_left_32(uint32_t v) {
  return v << N;
}
template <int N>
KT_INLINE uint32_t shift_right_32(uint32_t v) {
  return v >> N;
}

struct OneRow {
  using W = uint32_t;
  const uint8_t* block;
  int row;
  KT_INLINE void load(int offset, W (&w)[4]) const { std::memcpy(w, block + offset, 16); }
  KT_INLINE static W all(uint32_t v) { return v; }
  KT_INLINE void put(uint8_t* piece, W w) const { std::memcpy(piece + row * 4, &w, 4); }
  KT_INLINE void put_half(uint8_t* piece, W w) const { std::memcpy(piece + row * 2, &w, 2); }
  KT_INLINE void put_byte(uint8_t* piece, W w) const { piece[row] = static_cast<uint8_t>(w); }
  KT_INLINE void put_bytes(uint8_t* piece, W w) const {
    KT_UNROLL for (int j = 0; j < 4; j++)
      piece[j * 16 + row] = static_cast<uint8_t>(w >> (8 * j));
  }
};

// Rows v * kLanes ... of a panel; `block` belongs to the first of them.
struct VectorOfRows {
  using W = I32;
  const uint8_t* block;
  int64_t ldw;
  int v;
  KT_INLINE void load(int offset, W (&w)[4]) const { load_words(block + offset, ldw, w); }
  KT_INLINE static W all(uint32_t v) { return splat_i32(static_cast<int32_t>(v)); }
  KT_INLINE void put(uint8_t* piece, W w) const { store_i(piece + v * kLanes * 4, w); }
  KT_INLINE void put_half(uint8_t* piece, W w) const { store_low_16(piece + v * kLanes * 2, w); }
  KT_INLINE void put_byte(uint8_t* piece, W w) const { store_low_8(piece + v * kLanes, w); }
  KT_INLINE void put_bytes(uint8_t* piece, W w) const { store_bytes(piece + v * kLanes, w); }
};

// Bits i of `w` and i + D, for the i of `mask`, change places.
template <int D, class W>
KT_INLINE W swap_bits(W w, W mask) {
  const W t = band(bxor(w, shift_right_32<D>(w)), mask);
  return bxor(w, bxor(t, shift_left_32<D>(t)));
}

}  // namespace ktlinear::tinyblas::KT_TIER
