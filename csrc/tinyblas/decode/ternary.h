// Weights of -1, 0, 1 times a scale per 256: TQ1_0 (base-3 digits), TQ2_0 (two bits). See nibbles.h for what a decoder
// is.
//
// Packed record of 256 elements of 16 rows, 1088 bytes (GGUF: 16 blocks of 54 or 66):
//   | 16 words [16 rows][4 bytes] | 16 fp16 d | 32 bytes: TQ1_0 16 bytes [16 rows], then zeros; TQ2_0 zeros |
// Step s of group g is the bits 2(g % 4), 2(g % 4) + 1 of word 8(g / 4) + s. Words 0..15 are those of a TQ2_0 block.
//
// TQ1_0 is written out as two bits a digit, 26 % larger: five digits cost five products of all bytes with a power of 3,
// half a cycle for each vector of them, or one lookup once. 13 of 256 bytes of five digits have the digits of another
// byte: they come back since 3 stands for one of the digits, another one in each place. Bytes of four digits come back
// by two bits of rank among those with the same digits; the 16 bytes [16 rows] hold them.
#pragma once

#include "pieces.h"

namespace ktlinear::tinyblas {

inline constexpr int kPowersOf3[6] = {1, 3, 9, 27, 81, 243};

// TQ1_0: what 3 stands for in each place, so that every byte has a code of its own; place 5: word 12, where no 3
// occurs.
inline constexpr int kThird[6] = {0, 2, 1, 1, 0, 2};
// Bytes <-> ten bits: two for each of five digits, or for each of four and a rank.
struct DigitCodes {
  uint16_t code[256];
  uint8_t byte[1024];
};
consteval DigitCodes make_digit_codes(int digits) {
  DigitCodes t{};
  bool taken[1024] = {};
  for (int b = 0; b < 256; b++) {
    int code = 0, alias = -1;
    for (int n = 0, q = b; n < digits; n++, q = q * 3 & 255) {
      code |= (q * 3 >> 8) << (2 * n);
      if (alias < 0 && q * 3 >> 8 == kThird[n]) alias = n;
    }
    if (digits == 5 && taken[code]) code |= 3 << (2 * alias);
    while (digits == 4 && taken[code]) code += 256;
    if (taken[code]) throw "two bytes with one code";
    taken[code] = true;
    t.code[b] = static_cast<uint16_t>(code);
    t.byte[code] = static_cast<uint8_t>(b);
  }
  return t;
}
inline constexpr DigitCodes kFiveDigits = make_digit_codes(5), kFourDigits = make_digit_codes(4);

// For lookup16: codes of two bits of steps 0..3 and 4..7 of each group -> digits.
struct TernaryCodes {
  uint8_t code[2][8][16];
};
consteval TernaryCodes make_ternary_codes() {
  TernaryCodes t{};
  for (int half = 0; half < 2; half++)
    for (int g = 0; g < 8; g++)
      for (int i = 0; i < 16; i++) {
        const int place = g < 5 ? g : (g - 5) * 2 + half;
        t.code[half][g][i] = static_cast<uint8_t>(i % 4 == 3 ? kThird[place] : i % 4);
      }
  return t;
}
inline constexpr TernaryCodes kTernaryCodes = make_ternary_codes();

}  // namespace ktlinear::tinyblas

namespace ktlinear::tinyblas::KT_TIER {

struct Ternary {
  static constexpr bool kHasMinimum = false;
  static constexpr int kOffset = 1, kGroups = 8, kScales = 1, kBlock = 256, kMaxCode = 3;
  static constexpr int kScaleBytes = 1024, kRestBytes = kScaleBytes + 32, kRecordBytes = kScaleBytes + 64;

  KT_INLINE static F32 scale(const uint8_t* record, int, int, int v) { return load_halves(record + kScaleBytes, v); }
  KT_INLINE static F32 minimum(const uint8_t*, int, int, int) { return zero(); }
  template <int S>
  KT_INLINE static I32 code(const uint8_t* record, int group, int v) {
    const uint8_t* word = record + (group / 4 * 8 + S) * 64;
    return band(shift_right_32(load_i(word + v * kVectorBytes), group % 4 * 2), splat_i8(3));
  }
};

struct TQ2_0 : Ternary {
  static constexpr int kBlockBytes = sizeof(BlockTQ2_0);

  KT_INLINE static void pack_block(const uint8_t* block, uint8_t* record, int, int row) {
    KT_UNROLL for (int i = 0; i < 16; i++)
      std::memcpy(record + i * 64 + row * 4, block + i * 4, 4);
    std::memcpy(record + kScaleBytes + row * 2, block + 64, 2);
    std::memset(record + kRestBytes + row * 2, 0, 2);
  }
  KT_INLINE static void unpack_block(const uint8_t* record, int, int row, uint8_t* block) {
    KT_UNROLL for (int i = 0; i < 16; i++)
      std::memcpy(block + i * 4, record + i * 64 + row * 4, 4);
    std::memcpy(block + 64, record + kScaleBytes + row * 2, 2);
  }
  static void dequantize(const uint8_t* p, float* out) {
    const float d = half_to_float(load_as<uint16_t>(p + 64));
    for (int i = 0; i < 256; i++)
      out[i] = d * static_cast<float>((p[i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3) - 1);
  }
};

// Byte b is ceil(256 / 243 * the number with the digits t0 t1 .. t4), most significant first. So digit n is the integer
// part of 3 * (b * 3^n mod 256) / 256.
struct TQ1_0 : Ternary {
  static constexpr int kBlockBytes = sizeof(BlockTQ1_0);

  struct Digit {
    int word, power;
  };
  // Where step s of a group lies.
  KT_INLINE static Digit place(int group, int s) {
    if (group < 5) return {s, group};
    if (group == 7 && s >= 4) return {12, s - 4};
    return {8 + s % 4, (group - 5) * 2 + s / 4};
  }
  template <int S>
  KT_INLINE static I32 code(const uint8_t* record, int group, int v) {
    return lookup16(table16(kTernaryCodes.code[S / 4][group]), Ternary::code<S>(record, group, v));
  }
  // Digits 0..3 of word s < 8 are word s of the record, digit 4 the low bits of word 8 + s. Above these: digits 0, 2, 4
  // of words 8..11 in words 8..11, their digits 1, 3 and the digits of word 12 in words 12..15.
  KT_INLINE static void pack_block(const uint8_t* block, uint8_t* record, int, int row) {
    uint8_t* out = record + row * 4;
    uint32_t ranks = 0;
    for (int e = 0; e < 4; e++) {
      const uint32_t last = kFourDigits.code[block[48 + e]];
      ranks |= last >> 8 << (2 * e);
      for (int s = 0; s < 4; s++) {
        const uint32_t low = kFiveDigits.code[block[s * 4 + e]], high = kFiveDigits.code[block[16 + s * 4 + e]];
        const uint32_t rest = kFiveDigits.code[block[32 + s * 4 + e]];
        out[s * 64 + e] = static_cast<uint8_t>(low);
        out[(4 + s) * 64 + e] = static_cast<uint8_t>(high);
        out[(8 + s) * 64 + e] =
            static_cast<uint8_t>(low >> 8 | (rest & 3) << 2 | (rest >> 4 & 3) << 4 | rest >> 8 << 6);
        out[(12 + s) * 64 + e] =
            static_cast<uint8_t>(high >> 8 | (rest >> 2 & 3) << 2 | (rest >> 6 & 3) << 4 | (last >> (2 * s) & 3) << 6);
      }
    }
    std::memcpy(record + kScaleBytes + row * 2, block + 52, 2);
    record[kRestBytes + row] = static_cast<uint8_t>(ranks);
    record[kRestBytes + 16 + row] = 0;
  }
  KT_INLINE static void unpack_block(const uint8_t* record, int, int row, uint8_t* block) {
    const uint8_t* in = record + row * 4;
    for (int e = 0; e < 4; e++) {
      uint32_t last = (record[kRestBytes + row] >> (2 * e) & 3u) << 8;
      for (int s = 0; s < 4; s++) {
        const uint32_t a = in[(8 + s) * 64 + e], b = in[(12 + s) * 64 + e];
        const uint32_t rest =
            (a >> 2 & 3) | (b >> 2 & 3) << 2 | (a >> 4 & 3) << 4 | (b >> 4 & 3) << 6 | (a >> 6 & 3) << 8;
        block[s * 4 + e] = kFiveDigits.byte[in[s * 64 + e] | (a & 3) << 8];
        block[16 + s * 4 + e] = kFiveDigits.byte[in[(4 + s) * 64 + e] | (b & 3) << 8];
        block[32 + s * 4 + e] = kFiveDigits.byte[rest];
        last |= (b >> 6 & 3) << (2 * s);
      }
      block[48 + e] = kFourDigits.byte[last];
    }
    std::memcpy(block + 52, record + kScaleBytes + row * 2, 2);
  }
  static void dequantize(const uint8_t* p, float* out) {
    const float d = half_to_float(load_as<uint16_t>(p + 52));
    for (int i = 0; i < 256; i++) {
      const Digit at = place(i / 32, i % 32 / 4);
      const int b = p[at.word * 4 + i % 4] * kPowersOf3[at.power] & 255;
      out[i] = d * static_cast<float>((b * 3 >> 8) - 1);
    }
  }
};

}  // namespace ktlinear::tinyblas::KT_TIER
