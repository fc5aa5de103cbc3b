// Formats of 32-element blocks with a nibble per element, and maybe a fifth bit: Q4_0, Q4_1, Q5_0, Q5_1.
//
// A decoder is a struct of static functions over one packed record of a panel (16 rows x packed_k elements):
//   code<S>(record, group, v)      unsigned codes of step S (elements 4S..4S+3 of the group), vector v of the panel:
//                                  bytes [row][4 k], the VNNI order
//   scale(record, group, half, v)  fp32 scales of vector v's rows (half: 0, or 0 and 1 where kScales is 2); minimum(...)
//                                  likewise where kHasMinimum
//   pack(rows, record, index)      one GGUF block of each of the `rows` (see rows.h) -> its place in the record; `index` counts the
//                                  record's blocks. Or pack_block(block, record, index, row), for one row only
//   unpack_block                   back, for one row
//   dequantize                     one GGUF block -> fp32, as the reference does
// and the constants
//   kBlock: elements per GGUF block;  kBlockBytes, kRecordBytes
//   kOffset: w = scale * (code - kOffset) + minimum;  kMaxCode;  kGroups of 32 per record;  kScales per group;  kHasMinimum
// and maybe
//   Folded: a view of the same records with sub-scale times code as the code, for the kernels with products of whole bytes
//   kMinimumPairs, minimum_pair<J>(record, v), minus_dmin(record, v): integer minima of a super-block; see int8.h
//
// Packed record, two groups (64 elements) of 16 rows; bit planes and minima only where the format has them:
//   | group 0: 4 x [16 rows][4 bytes] nibbles, 1 x [16 rows][4 bytes] bits | group 1: the same | 2 x 16 fp16 d | 2 x 16 fp16 m |
// Quarter j of a group's nibbles holds bytes 4j..4j+3 of each row's qs: its low nibbles are step j, its high ones step
// j + 4. So packing moves whole 32-bit words, and every load is aligned to 64 bytes. In the bit plane, byte [row][i]
// holds the fifth bit of element 4s + i in bit s.
#pragma once

#include "pieces.h"

namespace ktlinear::tinyblas::KT_TIER {

template <class Block>
struct Nibbles {
  static constexpr bool kHasMinimum = requires(Block b) { b.m; }, kHasBit = requires(Block b) { b.qh; };
  static constexpr int kLevels = kHasBit ? 32 : 16, kMaxCode = kLevels - 1, kOffset = kHasMinimum ? 0 : kLevels / 2;
  static constexpr int kBlock = 32, kBlockBytes = sizeof(Block), kGroups = 2, kScales = 1;
  static constexpr int kGroupBytes = 256 + 64 * kHasBit, kScaleBytes = 2 * kGroupBytes,
                       kMinimumBytes = kScaleBytes + 64;
  static constexpr int kRecordBytes = kScaleBytes + 64 + 64 * kHasMinimum;

  template <int S>
  KT_INLINE static I32 code(const uint8_t* record, int group, int v) {
    const uint8_t* g = record + group * kGroupBytes;
    I32 u = nibble<S>(g, v);
    if constexpr (kHasBit) u = or_bit<S, 4>(u, g + 256, v);
    return u;
  }
  KT_INLINE static F32 scale(const uint8_t* record, int group, int, int v) {
    return load_halves(record + kScaleBytes + group * 32, v);
  }
  KT_INLINE static F32 minimum(const uint8_t* record, int group, int, int v) {
    return load_halves(record + kMinimumBytes + group * 32, v);
  }

  template <class Rows>
  KT_INLINE static void pack(const Rows& rows, uint8_t* record, int index) {
    uint8_t* g = record + index * kGroupBytes;
    typename Rows::W head[4], qs[4];
    rows.load(0, head);  // d, m or two bytes more; then qh
    rows.load(offsetof(Block, qs), qs);
    KT_UNROLL for (int j = 0; j < 4; j++)
      rows.put(g + j * 64, qs[j]);
    rows.put_half(record + kScaleBytes + index * 32, head[0]);
    const auto second = shift_right_32<16>(head[0]);
    if constexpr (kHasMinimum) rows.put_half(record + kMinimumBytes + index * 32, second);
    if constexpr (kHasBit)
      rows.put(g + 256, to_planes<Rows>(kHasMinimum ? head[1] : bor(second, shift_left_32<16>(head[1]))));
  }
  KT_INLINE static void unpack_block(const uint8_t* record, int index, int row, uint8_t* block) {
    const uint8_t* g = record + index * kGroupBytes + row * 4;
    KT_UNROLL for (int j = 0; j < 4; j++)
      std::memcpy(block + offsetof(Block, qs) + j * 4, g + j * 64, 4);
    if constexpr (kHasBit) {
      const uint32_t bits = from_planes(load_as<uint32_t>(g + 256));
      std::memcpy(block + offsetof(Block, qh), &bits, 4);
    }
    std::memcpy(block, record + kScaleBytes + index * 32 + row * 2, 2);
    if constexpr (kHasMinimum) std::memcpy(block + 2, record + kMinimumBytes + index * 32 + row * 2, 2);
  }

  static void dequantize(const uint8_t* p, float* out) {
    Block b;
    std::memcpy(&b, p, sizeof b);
    const float d = half_to_float(b.d);
    float m = 0;
    if constexpr (kHasMinimum) m = half_to_float(b.m);
    uint32_t high = 0;
    if constexpr (kHasBit) std::memcpy(&high, b.qh, 4);
    for (int j = 0; j < 32; j++) {
      const int nibble = j < 16 ? b.qs[j] & 15 : b.qs[j - 16] >> 4;
      const int q = nibble | static_cast<int>(high >> j & 1) << 4;
      out[j] = kHasMinimum ? d * static_cast<float>(q) + m : d * static_cast<float>(q - kOffset);
    }
  }
};

using Q4_0 = Nibbles<BlockQ4_0>;
using Q4_1 = Nibbles<BlockQ4_1>;
using Q5_0 = Nibbles<BlockQ5_0>;
using Q5_1 = Nibbles<BlockQ5_1>;

}  // namespace ktlinear::tinyblas::KT_TIER
