// Weights of -1, 0, 1 times a scale per 256: TQ1_0 (base-3 digits), TQ2_0 (two bits). See nibbles.h for what a decoder
// is.
//
// Packed records of 256 elements of 16 rows: the block's bytes as [4-byte word][16 rows], then 16 fp16 d, then 32 bytes
// of zeros that keep the next record aligned.
//   TQ2_0  1088 bytes (GGUF: 1056). Step s of group g is the bits 2(g % 4), 2(g % 4) + 1 of word 8(g / 4) + s.
//   TQ1_0   896 bytes (GGUF: 864). A step is one base-3 digit of the bytes of one word:
//     groups 0..4: digit g of word s;  the next 80 elements, 16n + m: digit n of words 8..11;  the last 16: word 12
#pragma once

#include "pieces.h"

namespace ktlinear::tinyblas {

inline constexpr int kPowersOf3[6] = {1, 3, 9, 27, 81, 243};

}  // namespace ktlinear::tinyblas

namespace ktlinear::tinyblas::KT_TIER {

template <int WORDS>
struct Ternary {
  static constexpr bool kHasMinimum = false;
  static constexpr int kOffset = 1, kGroups = 8, kScales = 1, kDirectRows = 4, kBlock = 256;
  static constexpr int kScaleBytes = WORDS * 64, kBlockBytes = WORDS * 4 + 2, kRecordBytes = kScaleBytes + 64;

  KT_INLINE static F32 scale(const uint8_t* record, int, int, int v) { return load_halves(record + kScaleBytes, v); }
  KT_INLINE static F32 minimum(const uint8_t*, int, int, int) { return zero(); }

  KT_INLINE static void pack_block(const uint8_t* block, uint8_t* record, int, int row) {
    KT_UNROLL for (int i = 0; i < WORDS; i++)
        std::memcpy(record + i * 64 + row * 4, block + i * 4, 4);
    std::memcpy(record + kScaleBytes + row * 2, block + WORDS * 4, 2);
    std::memset(record + kScaleBytes + 32 + row * 2, 0, 2);
  }
  KT_INLINE static void unpack_block(const uint8_t *record, int, int row,
                                     uint8_t *block) {
    KT_UNROLL for (int i = 0; i < WORDS; i++)
        std::memcpy(block + i * 4, record + i * 64 + row * 4, 4);
    std::memcpy(block + WORDS * 4, record + kScaleBytes + row * 2, 2);
  }
  // d = amax; codes are x / d rounded half away from zero, plus 1, with the fp32 inverse of the fp32 d.
  KT_INLINE static uint16_t ternary_codes(const float *x, uint8_t *codes) {
    float d = 0;
    for (int i = 0; i < 256; i++)
      d = __builtin_fabsf(x[i]) > d ? __builtin_fabsf(x[i]) : d;
    const float inverse = inverse_of_scale(d);
    for (int i = 0; i < 256; i++) {
      const float v = x[i] * inverse;
      codes[i] = static_cast<uint8_t>(1 + (v >= 0.5f) - (v <= -0.5f));
    }
    return float_to_half(d);
  }
};

struct TQ2_0 : Ternary<16> {
  static constexpr int kMaxCode = 3;

  template <int S>
  KT_INLINE static I32 code(const uint8_t *record, int group, int v) {
    const uint8_t *word = record + (group / 4 * 8 + S) * 64;
    return band(shift_right_32(load_i(word + v * kVectorBytes), group % 4 * 2),
                splat_i8(3));
  }
  static void dequantize(const uint8_t *p, float *out) {
    const float d = half_to_float(load_as<uint16_t>(p + 64));
    for (int i = 0; i < 256; i++)
      out[i] = d * static_cast<float>(
                       (p[i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3) - 1);
  }
  static void quantize(const float *x, uint8_t *p) {
    uint8_t codes[256];
    const uint16_t d = ternary_codes(x, codes);
    for (int b = 0; b < 64; b++) {
      const uint8_t *c = codes + b / 32 * 128 + b % 32;
      p[b] = static_cast<uint8_t>(c[0] | c[32] << 2 | c[64] << 4 | c[96] << 6);
    }
    std::memcpy(p + 64, &d, 2);
  }
};

// Byte b is ceil(256 / 243 * the number with the digits t0 t1 .. t4), most significant first. So digit n is the integer
// part of 3 * (b * 3^n mod 256) / 256.
struct TQ1_0 : Ternary<13> {
  static constexpr int kMaxCode = 2;

  struct Digit {
    int word, power;
  };
  // Where step s of a group lies.
  KT_INLINE static Digit place(int group, int s) {
    if (group < 5)
      return {s, group};
    if (group == 7 && s >= 4)
      return {12, s - 4};
    return {8 + s % 4, (group - 5) * 2 + s / 4};
  }
  // Even and odd bytes apart, each in the high half of a 16-bit unit, where the product is taken mod 256 by itself.
  template <int S>
  KT_INLINE static I32 code(const uint8_t *record, int group, int v) {
    const Digit at = place(group, S);
    const I32 b = load_i(record + at.word * 64 + v * kVectorBytes);
    const I32 power = splat_i32(kPowersOf3[at.power] * 0x10001),
              three = splat_i32(0x00030003);
    const I32 even =
        mul_high_u16(mul_low_16(shift_left_16<8>(b), power), three);
    const I32 odd = mul_high_u16(
        mul_low_16(band(b, splat_i32(static_cast<int32_t>(0xFF00FF00u))),
                   power),
        three);
    return bor(even, shift_left_16<8>(odd));
  }
  static void dequantize(const uint8_t *p, float *out) {
    const float d = half_to_float(load_as<uint16_t>(p + 52));
    for (int i = 0; i < 256; i++) {
      const Digit at = place(i / 32, i % 32 / 4);
      const int b = p[at.word * 4 + i % 4] * kPowersOf3[at.power] & 255;
      out[i] = d * static_cast<float>((b * 3 >> 8) - 1);
    }
  }
  static void quantize(const float *x, uint8_t *p) {
    uint8_t codes[256];
    const uint16_t d = ternary_codes(x, codes);
    uint8_t sums[52] = {};
    for (int i = 0; i < 256; i++) {
      const Digit at = place(i / 32, i % 32 / 4);
      uint8_t &sum = sums[at.word * 4 + i % 4];
      sum = static_cast<uint8_t>(sum + codes[i] * kPowersOf3[4 - at.power]);
    }
    for (int b = 0; b < 52; b++)
      p[b] = static_cast<uint8_t>((sums[b] * 256 + 242) / 243);
    std::memcpy(p + 52, &d, 2);
  }
};

} // namespace ktlinear::tinyblas::KT_TIER
