// Formats of 32-element blocks with one nibble per element: Q4_0, Q4_1.
//
// A decoder is a struct of static functions over one packed record of a panel (16 rows x packed_k elements):
//   code<S>(record, group, v)      unsigned codes of step S (elements 4S..4S+3 of the group), vector v of the panel:
//                                  bytes [row][4 k], the VNNI order
//   scale(record, group, half, v)  fp32 scales of vector v's rows (half: 0, or 0 and 1 where kScales is 2); minimum(...) likewise
//                                  where kHasMinimum
//   pack_block / unpack_block      one GGUF block of one row <-> its place in the record
//   quantize / dequantize          one GGUF block <-> fp32, as the reference does
// and the constants
//   kOffset: w = scale * (code - kOffset) + minimum;  kMaxCode;  kGroups of 32 per record;  kScales per group;  kHasMinimum
//   kDirectRows: rows of x that the small-M kernel takes at once (8; 4 where decoding is long)
//
// Packed record, two groups (64 elements) of 16 rows:
//   | group 0: 4 x [16 rows][4 bytes] | group 1: the same | 2 x 16 fp16 d | Q4_1: 2 x 16 fp16 m |
// Quarter j of a group holds bytes 4j..4j+3 of each row's qs: its low nibbles are step j, its high ones step j + 4. So packing
// moves whole 32-bit words, and every load is aligned to 64 bytes.
#pragma once

#include "../epilogue.h"

namespace ktlinear::tinyblas::KT_TIER {

template <class Block>
struct Nibbles {
  static constexpr bool kHasMinimum = sizeof(Block) == sizeof(BlockQ4_1);
  static constexpr int kOffset = kHasMinimum ? 0 : 8;
  static constexpr int kMaxCode = 15, kGroups = 2, kScales = 1, kDirectRows = 8;
  static constexpr int kScaleBytes = 512, kMinimumBytes = 576;
  static constexpr int kRecordBytes = kHasMinimum ? 640 : 576, kBlockBytes = sizeof(Block);

  template <int S>
  KT_INLINE static I32 code(const uint8_t* record, int group, int v) {
    const I32 bytes = load_i(record + group * 256 + S % 4 * 64 + v * kLanes * 4);
    return band(S < 4 ? bytes : shift_right_16<4>(bytes), splat_i8(15));
  }
  KT_INLINE static F32 scale(const uint8_t* record, int group, int, int v) {
    return load_f16(reinterpret_cast<const uint16_t*>(record + kScaleBytes + group * 32) + v * kLanes);
  }
  KT_INLINE static F32 minimum(const uint8_t* record, int group, int, int v) {
    return load_f16(reinterpret_cast<const uint16_t*>(record + kMinimumBytes + group * 32) + v * kLanes);
  }

  KT_INLINE static void pack_block(const uint8_t* block, uint8_t* record, int group, int row) {
    KT_UNROLL for (int j = 0; j < 4; j++)
      std::memcpy(record + group * 256 + j * 64 + row * 4, block + offsetof(Block, qs) + j * 4, 4);
    std::memcpy(record + kScaleBytes + group * 32 + row * 2, block, 2);
    if constexpr (kHasMinimum) std::memcpy(record + kMinimumBytes + group * 32 + row * 2, block + 2, 2);
  }
  KT_INLINE static void unpack_block(const uint8_t* record, int group, int row, uint8_t* block) {
    KT_UNROLL for (int j = 0; j < 4; j++)
      std::memcpy(block + offsetof(Block, qs) + j * 4, record + group * 256 + j * 64 + row * 4, 4);
    std::memcpy(block, record + kScaleBytes + group * 32 + row * 2, 2);
    if constexpr (kHasMinimum) std::memcpy(block + 2, record + kMinimumBytes + group * 32 + row * 2, 2);
  }

  static void dequantize(const uint8_t* p, float* out) {
    Block b;
    std::memcpy(&b, p, sizeof b);
    const float d = half_to_float(b.d);
    float m = 0;
    if constexpr (kHasMinimum) m = half_to_float(b.m);
    for (int j = 0; j < 16; j++) {
      const int lo = b.qs[j] & 15, hi = b.qs[j] >> 4;
      out[j] = kHasMinimum ? d * static_cast<float>(lo) + m : d * static_cast<float>(lo - kOffset);
      out[j + 16] = kHasMinimum ? d * static_cast<float>(hi) + m : d * static_cast<float>(hi - kOffset);
    }
  }
  // Q4_0: d = x / -8 for the x of largest magnitude, q = min(15, trunc(x / d + 8.5)).
  // Q4_1: d = (max - min) / 15, m = min, q = min(15, trunc((x - m) / d + 0.5)).  Both with the fp32 inverse of the fp32 d.
  static void quantize(const float* x, uint8_t* p) {
    Block b{};
    float base = 0, d;
    if constexpr (kHasMinimum) {
      float lo = x[0], hi = x[0];
      for (int i = 1; i < 32; i++) {
        lo = x[i] < lo ? x[i] : lo;
        hi = x[i] > hi ? x[i] : hi;
      }
      d = (hi - lo) / 15.f;
      base = lo;
      b.m = float_to_half(lo);
    } else {
      float extreme = x[0];  // the first of several equal magnitudes, sign and all
      for (int i = 1; i < 32; i++) extreme = __builtin_fabsf(x[i]) > __builtin_fabsf(extreme) ? x[i] : extreme;
      d = extreme / -8.f;
    }
    const float inverse = d != 0 ? 1.f / d : 0.f;
    b.d = float_to_half(d);
    for (int j = 0; j < 16; j++) {
      const float half = kHasMinimum ? 0.5f : 8.5f;
      const float lo = (x[j] - base) * inverse + half, hi = (x[j + 16] - base) * inverse + half;
      b.qs[j] = static_cast<uint8_t>(nibble(lo) | nibble(hi) << 4);
    }
    std::memcpy(p, &b, sizeof b);
  }

 private:
  KT_INLINE static int nibble(float v) {
    const int q = static_cast<int>(v < 15.f ? v : 15.f);  // v >= 0 but for NaN, which compares false
    return q;
  }
};

using Q4_0 = Nibbles<BlockQ4_0>;
using Q4_1 = Nibbles<BlockQ4_1>;

}  // namespace ktlinear::tinyblas::KT_TIER
