// Formats whose nibble is an index into a codebook: IQ4_NL, IQ4_XS, MXFP4, NVFP4. See nibbles.h for what a decoder is.
//
// Packed records of 16 rows, all of the GGUF blocks' own size; "nibbles" as in pieces.h.
//   IQ4_NL   64 elements   | 2 x nibbles | 2 x 16 fp16 d |
//   MXFP4   128 elements   | 4 x nibbles | 4 x 16 E8M0 scales |
//   NVFP4    64 elements   | 2 x nibbles | 4 x 16 E4M3 scales, one per 16 elements |
//   IQ4_XS  256 elements   | 8 x nibbles | 4 x 16 bytes: low scale bits | 2 x 16: high ones | 16 fp16 d |
#pragma once

#include <bit>

#include "pieces.h"

namespace ktlinear::tinyblas {

// Non-uniform levels of IQ4, moved by 128: the offset of the product for 8-bit codes.
inline constexpr uint8_t kLevelsIQ4[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
// E2M1, doubled to integers, moved by 12.
inline constexpr uint8_t kLevelsE2M1[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

struct ScaleTable {
  float value[256];
};
// Half of the scale, since the levels are doubled. E8M0: 2^(code - 128), subnormal for codes 0 and 1; 255 is taken as a
// number, as the reference does.
consteval ScaleTable make_e8m0() {
  ScaleTable t{};
  for (uint32_t e = 0; e < 256; e++) t.value[e] = std::bit_cast<float>(e < 2 ? 0x00200000u << e : (e - 1) << 23);
  return t;
}
// Unsigned E4M3: bits 3..6 exponent (bias 7), bits 0..2 mantissa. 0x7F means 0; bit 7 is ignored, except that 0xFF is a
// number.
consteval ScaleTable make_e4m3() {
  ScaleTable t{};
  for (uint32_t i = 0; i < 256; i++) {
    const uint32_t exponent = i >> 3 & 15, mantissa = i & 7;
    const float unit =
        std::bit_cast<float>((exponent > 0 ? exponent - 1 + 117 : 117) << 23);  // half of 2^(exponent - 10)
    t.value[i] = i == 0x7F ? 0 : unit * static_cast<float>(exponent > 0 ? 8 + mantissa : mantissa);
  }
  return t;
}
inline constexpr ScaleTable kE8M0 = make_e8m0(), kE4M3 = make_e4m3();
static_assert(kE8M0.value[127] == 0.5f && kE4M3.value[0x38] == 0.5f && kE4M3.value[1] == 0x1p-10f);

}  // namespace ktlinear::tinyblas

namespace ktlinear::tinyblas::KT_TIER {

// 16 bytes of nibbles, as in Q4_0, <-> one row of a group.
template <class Rows>
KT_INLINE void put_quarters(const Rows& rows, int offset, uint8_t* group) {
  typename Rows::W w[4];
  rows.load(offset, w);
  KT_UNROLL for (int j = 0; j < 4; j++)
    rows.put(group + j * 64, w[j]);
}
KT_INLINE void get_quarters(const uint8_t* group, int row, uint8_t* qs) {
  KT_UNROLL for (int j = 0; j < 4; j++)
    std::memcpy(qs + j * 4, group + j * 64 + row * 4, 4);
}

// kLanes scales, as the tables have them. Computed, since a gather is a load for each lane.
//   E8M0   bits (e - 1) << 23; for e = 0, 1, whose values are subnormal, 2^21 and 2^22, which are below all others
KT_INLINE F32 e8m0(const uint8_t* p) {
  const I32 e = load_u8(p), low = add_i32(shift_left_32<21>(band(e, splat_i32(1))), splat_i32(1 << 21));
  return as_f32(max_i32(shift_left_32<23>(add_i32(e, splat_i32(-1))), low));
}
//   E4M3   the smaller of (1 + m / 8) * 2^(E - 8) and, for E = 0, (1 + m / 8) * 2^(E - 7) - 2^-7 = m / 8 * 2^-7
KT_INLINE F32 e4m3(const uint8_t* p) {
  const I32 c = load_u8(p), field = shift_left_32<20>(band(c, splat_i32(0x7F)));
  const F32 subnormal = sub(as_f32(add_i32(field, splat_i32(120 << 23))), set1(0x1p-7f));
  const I32 a = add_i32(field, splat_i32(119 << 23)), b = as_i32(subnormal);
  const I32 smaller = bxor(bxor(a, b), max_i32(a, b));  // both are positive: ordered as their bits
  return as_f32(band(smaller, greater_i32(bxor(c, splat_i32(0x7F)), splat_i32(0))));
}

template <const uint8_t (&LEVELS)[16], int OFFSET, int MAX_CODE, int GROUPS, int SCALES>
struct Codebook {
  static constexpr bool kHasMinimum = false;
  static constexpr int kOffset = OFFSET, kMaxCode = MAX_CODE, kGroups = GROUPS, kScales = SCALES;
  static constexpr int kNibbleBytes = kGroups * 256;

  template <int S>
  KT_INLINE static I32 code(const uint8_t* record, int group, int v) {
    return lookup16(table16(LEVELS), nibble<S>(record + group * 256, v));
  }
  KT_INLINE static F32 minimum(const uint8_t*, int, int, int) { return zero(); }
  KT_INLINE static float level(int q) { return static_cast<float>(LEVELS[q] - OFFSET); }
};

struct IQ4_NL : Codebook<kLevelsIQ4, 128, 241, 2, 1> {
  static constexpr int kBlock = 32, kBlockBytes = sizeof(BlockIQ4_NL), kRecordBytes = kNibbleBytes + 64;

  KT_INLINE static F32 scale(const uint8_t* record, int group, int, int v) {
    return load_halves(record + kNibbleBytes + group * 32, v);
  }
  template <class Rows>
  KT_INLINE static void pack(const Rows& rows, uint8_t* record, int index) {
    typename Rows::W head[4];
    rows.load(0, head);
    rows.put_half(record + kNibbleBytes + index * 32, head[0]);
    put_quarters(rows, 2, record + index * 256);
  }
  KT_INLINE static void unpack_block(const uint8_t* record, int index, int row, uint8_t* block) {
    get_quarters(record + index * 256, row, block + 2);
    std::memcpy(block, record + kNibbleBytes + index * 32 + row * 2, 2);
  }
  static void dequantize(const uint8_t* p, float* out) {
    const float d = half_to_float(load_as<uint16_t>(p));
    for (int j = 0; j < 16; j++) {
      out[j] = d * level(p[2 + j] & 15);
      out[j + 16] = d * level(p[2 + j] >> 4);
    }
  }
};

struct MXFP4 : Codebook<kLevelsE2M1, 12, 24, 4, 1> {
  static constexpr int kBlock = 32, kBlockBytes = sizeof(BlockMXFP4), kRecordBytes = kNibbleBytes + 64;

  KT_INLINE static F32 scale(const uint8_t* record, int group, int, int v) {
    return e8m0(record + kNibbleBytes + group * 16 + v * kLanes);
  }
  template <class Rows>
  KT_INLINE static void pack(const Rows& rows, uint8_t* record, int index) {
    typename Rows::W head[4];
    rows.load(0, head);
    rows.put_byte(record + kNibbleBytes + index * 16, head[0]);
    put_quarters(rows, 1, record + index * 256);
  }
  KT_INLINE static void unpack_block(const uint8_t* record, int index, int row, uint8_t* block) {
    get_quarters(record + index * 256, row, block + 1);
    block[0] = record[kNibbleBytes + index * 16 + row];
  }
  static void dequantize(const uint8_t* p, float* out) {
    const float d = kE8M0.value[p[0]];
    for (int j = 0; j < 16; j++) {
      out[j] = d * level(p[1 + j] & 15);
      out[j + 16] = d * level(p[1 + j] >> 4);
    }
  }
};

// Sub-block s of 16: low nibbles of its 8 bytes are elements 16s..16s+7, high ones 16s+8..16s+15. Step j of a group has
// to lie in one nibble of quarter j % 4: low for the group's first sub-block, high for its second.
struct NVFP4 : Codebook<kLevelsE2M1, 12, 24, 2, 2> {
  static constexpr int kBlock = 64, kBlockBytes = sizeof(BlockNVFP4), kRecordBytes = kNibbleBytes + 64;

  KT_INLINE static F32 scale(const uint8_t* record, int group, int half, int v) {
    return e4m3(record + kNibbleBytes + (group * 2 + half) * 16 + v * kLanes);
  }
  // Words a0 a1 of the first sub-block and b0 b1 of the second <-> quarters a0l:b0l a1l:b1l a0h:b0h a1h:b1h (low:high
  // nibbles).
  template <class Rows>
  KT_INLINE static void pack(const Rows& rows, uint8_t* record, int) {
    typename Rows::W w[4];
    rows.load(0, w);
    rows.put_bytes(record + kNibbleBytes, w[0]);
    const auto low = Rows::all(0x0F0F0F0F), high = Rows::all(0xF0F0F0F0);
    KT_UNROLL for (int g = 0; g < 2; g++) {
      rows.load(4 + g * 16, w);  // a0 a1 b0 b1
      KT_UNROLL for (int j = 0; j < 2; j++) {
        uint8_t* quarter = record + g * 256 + j * 64;
        rows.put(quarter, bor(band(w[j], low), shift_left_32<4>(band(w[j + 2], low))));
        rows.put(quarter + 128, bor(band(shift_right_32<4>(w[j]), low), band(w[j + 2], high)));
      }
    }
  }
  KT_INLINE static void unpack_block(const uint8_t* record, int, int row, uint8_t* block) {
    constexpr uint32_t low = 0x0F0F0F0Fu;
    KT_UNROLL for (int g = 0; g < 2; g++) {
      KT_UNROLL for (int j = 0; j < 2; j++) {
        const uint32_t first = load_as<uint32_t>(record + g * 256 + j * 64 + row * 4),
                       second = load_as<uint32_t>(record + g * 256 + (j + 2) * 64 + row * 4);
        const uint32_t a = (first & low) | (second & low) << 4, b = (first >> 4 & low) | (second & ~low);
        std::memcpy(block + 4 + g * 16 + j * 4, &a, 4);
        std::memcpy(block + 12 + g * 16 + j * 4, &b, 4);
      }
    }
    KT_UNROLL for (int i = 0; i < 4; i++)
      block[i] = record[kNibbleBytes + i * 16 + row];
  }
  static void dequantize(const uint8_t* p, float* out) {
    for (int s = 0; s < 4; s++) {
      const float d = kE4M3.value[p[s]];
      for (int j = 0; j < 8; j++) {
        out[s * 16 + j] = d * level(p[4 + s * 8 + j] & 15);
        out[s * 16 + j + 8] = d * level(p[4 + s * 8 + j] >> 4);
      }
    }
  }
};

struct IQ4_XS : Codebook<kLevelsIQ4, 128, 241, 8, 1> {
  static constexpr int kBlock = 256, kBlockBytes = sizeof(BlockIQ4_XS);
  static constexpr int kLowBytes = kNibbleBytes, kHighBytes = kLowBytes + 64, kScaleBytes = kHighBytes + 32,
                       kRecordBytes = kScaleBytes + 32;

  KT_INLINE static F32 scale(const uint8_t* record, int group, int, int v) {
    const I32 low = shift_right_32(load_u8(record + kLowBytes + group / 2 * 16 + v * kLanes), group % 2 * 4);
    const I32 high = shift_right_32(load_u8(record + kHighBytes + group / 4 * 16 + v * kLanes), group % 4 * 2);
    const I32 code = bor(band(low, splat_i32(15)), shift_left_16<4>(band(high, splat_i32(3))));
    return mul(load_halves(record + kScaleBytes, v), sub(to_f32(code), set1(32.f)));
  }
  template <class Rows>
  KT_INLINE static void pack(const Rows& rows, uint8_t* record, int) {
    typename Rows::W head[4];
    rows.load(0, head);  // d, two bytes of high bits, four of low bits
    rows.put_half(record + kScaleBytes, head[0]);
    rows.put_bytes(record + kLowBytes, head[1]);
    KT_UNROLL for (int i = 0; i < 2; i++)
      rows.put_byte(record + kHighBytes + i * 16, i == 0 ? shift_right_32<16>(head[0]) : shift_right_32<24>(head[0]));
    KT_UNROLL for (int g = 0; g < 8; g++)
      put_quarters(rows, 8 + g * 16, record + g * 256);
  }
  KT_INLINE static void unpack_block(const uint8_t* record, int, int row, uint8_t* block) {
    KT_UNROLL for (int g = 0; g < 8; g++)
      get_quarters(record + g * 256, row, block + 8 + g * 16);
    KT_UNROLL for (int i = 0; i < 4; i++)
      block[4 + i] = record[kLowBytes + i * 16 + row];
    KT_UNROLL for (int i = 0; i < 2; i++)
      block[2 + i] = record[kHighBytes + i * 16 + row];
    std::memcpy(block, record + kScaleBytes + row * 2, 2);
  }
  static void dequantize(const uint8_t* p, float* out) {
    const float d = half_to_float(load_as<uint16_t>(p));
    const uint32_t high = load_as<uint16_t>(p + 2);
    for (int g = 0; g < 8; g++, out += 32) {
      const int code = (p[4 + g / 2] >> (g % 2 * 4) & 15) | static_cast<int>(high >> (g * 2) & 3) << 4;
      const float scale = d * static_cast<float>(code - 32);
      const uint8_t* qs = p + 8 + g * 16;
      for (int j = 0; j < 16; j++) {
        out[j] = scale * level(qs[j] & 15);
        out[j + 16] = scale * level(qs[j] >> 4);
      }
    }
  }
};

}  // namespace ktlinear::tinyblas::KT_TIER
