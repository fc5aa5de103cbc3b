// Formats whose codes are points of a grid: IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, IQ1_S, IQ1_M. See nibbles.h for
// what a decoder is.
//
// Four or eight elements share one index into a grid (grids.h); IQ2 and IQ3 add a sign per element, IQ1 moves a whole
// group, or eight elements, by an eighth up or down. A gather takes more than a cycle for each of its lanes, so the
// packed records hold the points written out: larger by a quarter to a half, and read at the speed of memory.
//
// Packed record of 256 elements of 16 rows:
//   | 8 groups of codes | words, each [16 rows][4 bytes] | planes, each [16 rows] | 16 fp16 d | zeros up to 64 bytes |
//
//           codes of a group                                        words, planes             bytes (16 GGUF blocks)
//   IQ2     3 x 64 bytes [row][4] of 3 bits: level, 4 if negative   4-bit scales   XXS 1664 (1056)  XS 1728 (1184)  S 1728 (1312)
//   IQ3     nibbles (pieces.h): level, 8 if negative                4-bit scales   XXS 2176 (1568)  S 2176 (1760)
//   IQ1_S   crumbs (pieces.h): g + 1                                nibbles: 3-bit scale, 8 if moved down  1152 (800)
//   IQ1_M   crumbs                                                  nibbles: four directions; six planes: 16 3-bit scales  1216 (896)
// Nibble i of the words belongs to scale (IQ1_M: group) i.
#pragma once

#include "grids.h"
#include "pieces.h"

namespace ktlinear::tinyblas {

// Half h of a point is the word [h][index], a byte an element.
template <int HALVES, int N>
struct Grid {
  uint32_t words[HALVES][N];
};
// meaning[digit] of each element.
template <int HALVES, int N, int DIGITS>
consteval Grid<HALVES, N> make_grid(const uint16_t (&points)[N], const int (&meaning)[DIGITS], int offset = 0) {
  constexpr int bits = 16 / (HALVES * 4);
  Grid<HALVES, N> grid{};
  for (int i = 0; i < N; i++)
    for (int e = 0; e < HALVES * 4; e++) {
      const int value = meaning[points[i] >> (bits * e) & ((1 << bits) - 1)] + offset;
      grid.words[e / 4][i] |= static_cast<uint32_t>(value) << (e % 4 * 8);
    }
  return grid;
}
inline constexpr auto kIQ2_XXS = make_grid<2>(kGridIQ2_XXS, kDigitsIQ2_XXS);
inline constexpr auto kIQ2_XS = make_grid<2>(kGridIQ2_XS, kDigitsIQ2_XS);
inline constexpr auto kIQ2_S = make_grid<2>(kGridIQ2_S, kDigitsIQ2_S);
inline constexpr auto kIQ3_XXS = make_grid<1>(kGridIQ3_XXS, kDigitsIQ3_XXS);
inline constexpr auto kIQ3_S = make_grid<1>(kGridIQ3_S, kDigitsIQ3_S);
inline constexpr auto kIQ1 = make_grid<2>(kGridIQ1, kDigitsIQ1, 1);

// From an index to the digits of its point and back. The digits of element e are in byte e of a word, those of element
// e + 4 of a point of eight SHIFT bits above. BASE digits in use; digits beyond them, which no index has, find one too.
template <int N, int ELEMENTS, int BASE, int SHIFT>
struct Digits {
  static constexpr int kBits = 16 / ELEMENTS, kUsed = BASE == 3 ? 2 : 3;
  static constexpr int power(int n) { return n == 0 ? 1 : BASE * power(n - 1); }
  uint32_t word[N];
  uint16_t index[((1 << kUsed) - 1) * (power(ELEMENTS) - 1) / (BASE - 1) + 1];

  constexpr uint32_t find(uint32_t w) const {
    int number = 0;
    for (int e = 0; e < ELEMENTS; e++)
      number += static_cast<int>(w >> (e % 4 * 8 + e / 4 * SHIFT) & ((1 << kUsed) - 1)) * power(e);
    return index[number];
  }
};
template <int ELEMENTS, int BASE, int SHIFT, int N>
consteval Digits<N, ELEMENTS, BASE, SHIFT> make_digits(const uint16_t (&points)[N]) {
  Digits<N, ELEMENTS, BASE, SHIFT> d{};
  for (int i = 0; i < N; i++) {
    int number = 0;
    for (int e = 0; e < ELEMENTS; e++) {
      const int digit = points[i] >> (d.kBits * e) & ((1 << d.kBits) - 1);
      d.word[i] |= static_cast<uint32_t>(digit) << (e % 4 * 8 + e / 4 * SHIFT);
      number += digit * d.power(e);
    }
    d.index[number] = static_cast<uint16_t>(i);
  }
  return d;
}
inline constexpr auto kDigitsOfIQ2_XXS = make_digits<8, 3, 3>(kGridIQ2_XXS);
inline constexpr auto kDigitsOfIQ2_XS = make_digits<8, 3, 3>(kGridIQ2_XS);
inline constexpr auto kDigitsOfIQ2_S = make_digits<8, 3, 3>(kGridIQ2_S);
inline constexpr auto kDigitsOfIQ3_XXS = make_digits<4, 8, 0>(kGridIQ3_XXS);
inline constexpr auto kDigitsOfIQ3_S = make_digits<4, 8, 0>(kGridIQ3_S);
inline constexpr auto kDigitsOfIQ1 = make_digits<8, 3, 2>(kGridIQ1);

// offset + level, then offset - level, for lookup16.
struct Codes16 {
  uint8_t code[16];
};
template <int LEVELS>
consteval Codes16 make_codes(const int (&levels)[LEVELS], int offset) {
  constexpr int half = LEVELS <= 4 ? 4 : 8;
  Codes16 t{};
  for (int i = 0; i < 16; i++) {
    const int level = i % half < LEVELS ? levels[i % half] : 0;
    t.code[i] = static_cast<uint8_t>(i / half % 2 ? offset - level : offset + level);
  }
  return t;
}
inline constexpr Codes16 kCodesIQ2 = make_codes(kDigitsIQ2_XXS, 43), kCodesIQ3_XXS = make_codes(kDigitsIQ3_XXS, 62),
                         kCodesIQ3_S = make_codes(kDigitsIQ3_S, 15);
// Spreads byte 0 of each 32-bit lane over the lane.
inline constexpr uint8_t kByte0[16] = {0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12};

template <int N>
struct Words {
  uint32_t word[N];
};
// A byte of ones where an element is negative, for four sign bits.
consteval Words<16> make_sign_masks() {
  Words<16> t{};
  for (uint32_t i = 0; i < 16; i++)
    for (int b = 0; b < 4; b++) t.word[i] |= (i >> b & 1) * (0xFFu << (8 * b));
  return t;
}
// All eight signs of a 7-bit sign index: the eighth makes the number of negative elements even.
struct EvenSigns {
  uint8_t signs[128];
};
consteval EvenSigns make_even_signs() {
  EvenSigns t{};
  for (uint32_t i = 0; i < 128; i++) {
    uint32_t parity = 0;
    for (int b = 0; b < 7; b++) parity ^= i >> b & 1;
    t.signs[i] = static_cast<uint8_t>(i | parity << 7);
  }
  return t;
}
inline constexpr Words<16> kSignMasks = make_sign_masks();
inline constexpr EvenSigns kEvenSigns = make_even_signs();

}  // namespace ktlinear::tinyblas

namespace ktlinear::tinyblas::KT_TIER {

template <int GROUP_BYTES, int WORDS, int PLANES, int OFFSET, int MAX_CODE, int SCALES>
struct Expanded {
  static constexpr bool kHasMinimum = false;
  static constexpr int kOffset = OFFSET, kMaxCode = MAX_CODE, kGroups = 8, kScales = SCALES, kBlock = 256;
  static constexpr int kWords = 8 * GROUP_BYTES, kPlanes = kWords + WORDS * 64, kScaleBytes = kPlanes + PLANES * 16,
                       kRecordBytes = (kScaleBytes + 32 + 63) / 64 * 64;

  KT_INLINE static F32 minimum(const uint8_t*, int, int, int) { return zero(); }
  KT_INLINE static const uint8_t* codes(const uint8_t* record, int group) { return record + group * GROUP_BYTES; }
  KT_INLINE static uint8_t* codes(uint8_t* record, int group) { return record + group * GROUP_BYTES; }
  KT_INLINE static F32 d(const uint8_t* record, int v) { return load_halves(record + kScaleBytes, v); }
  // Nibble i of the words, and what lies above it in its word.
  KT_INLINE static I32 nibbles_from(const uint8_t* record, int i, int v) {
    return shift_right_32(load_i(record + kWords + i / 8 * 64 + v * kVectorBytes), i % 8 * 4);
  }
  KT_INLINE static void put_d(uint8_t* record, int row, uint32_t d) {
    std::memcpy(record + kScaleBytes + row * 2, &d, 2);
    if constexpr (kScaleBytes + 32 < kRecordBytes) std::memset(record + kScaleBytes + 32 + row * 2, 0, 2);
  }
};

// Four signs as bit 0 of four bytes, and back.
KT_INLINE uint32_t spread_signs(uint32_t signs) { return kSignMasks.word[signs & 15] & 0x01010101u; }
KT_INLINE uint32_t collect_signs(uint32_t word) { return (word & 0x01010101u) * 0x10204080u >> 28; }

// Four elements of a block: scale * (+- magnitudes).
KT_INLINE void put_signed(float* out, float scale, uint32_t magnitudes, uint32_t signs) {
  for (int i = 0; i < 4; i++) {
    const float w = scale * static_cast<float>(magnitudes >> (8 * i) & 255);
    out[i] = signs >> i & 1 ? -w : w;
  }
}

// ---------------------------------------------------------------- IQ2

// A block, whichever bytes it is in: per eight elements an index and eight signs; a nibble for each scale.
struct Points8 {
  uint32_t index[32], signs[32];
  uint64_t scales;
};

// Codes of steps 0..7: 0, 1, 2, 3, 4, 5 are bits 0..2 and 3..5 of the three vectors. What is left of these holds
//   bits 6, 7 of vector 0: two low bits of step 6;  of vector 1: of step 7;  of vector 2: the high bits of both
// A scale is d * (0.5 + s) / 4.
template <class Format, int SCALES>
struct IQ2 : Expanded<192, SCALES, 0, 43, 86, SCALES> {
  using Base = Expanded<192, SCALES, 0, 43, 86, SCALES>;

  template <int S>
  KT_INLINE static I32 code(const uint8_t* record, int group, int v) {
    const uint8_t* group_codes = Base::codes(record, group) + v * kVectorBytes;
    auto bits = [&]<int VECTOR, int SHIFT>(uint8_t mask) KT_ALWAYS_INLINE_LAMBDA {
      return band(shift_16<SHIFT>(load_i(group_codes + VECTOR * 64)), splat_i8(mask));
    };
    I32 c;
    if constexpr (S < 6)
      c = bits.template operator()<S / 2, S % 2 * -3>(7);
    else
      c = bor(bits.template operator()<S - 6, -6>(3), bits.template operator()<2, S == 6 ? -4 : -5>(4));
    return lookup16(table16(kCodesIQ2.code), c);
  }
  KT_INLINE static F32 scale(const uint8_t* record, int group, int half, int v) {
    const I32 s = band(Base::nibbles_from(record, group * SCALES + half, v), splat_i32(15));
    return mul(Base::d(record, v), fma(to_f32(s), set1(0.25f), set1(0.125f)));
  }

  // `pair`: steps 2i and 2i + 1 in bits 0..5 of four bytes.
  KT_INLINE static void pack_block(const uint8_t* block, uint8_t* record, int, int row) {
    KT_UNROLL for (int g = 0; g < 8; g++) {
      uint32_t pair[4];
      KT_UNROLL for (int i = 0; i < 4; i++) {
        const uint32_t signs = Format::signs(block, g * 4 + i);
        pair[i] = Format::kDigits.word[Format::index(block, g * 4 + i)] | spread_signs(signs) << 2 |
                  spread_signs(signs >> 4) << 5;
      }
      const uint32_t last = pair[3];
      pair[0] |= (last & 0x03030303u) << 6;
      pair[1] |= (last & 0x18181818u) << 3;
      pair[2] |= (last & 0x04040404u) << 4 | (last & 0x20202020u) << 2;
      KT_UNROLL for (int i = 0; i < 3; i++)
        std::memcpy(Base::codes(record, g) + i * 64 + row * 4, &pair[i], 4);
    }
    const uint64_t scales = Format::scales(block);
    KT_UNROLL for (int i = 0; i < SCALES; i++) {
      const uint32_t word = static_cast<uint32_t>(scales >> (32 * i));
      std::memcpy(record + Base::kWords + i * 64 + row * 4, &word, 4);
    }
    Base::put_d(record, row, load_as<uint16_t>(block));
  }
  KT_INLINE static void unpack_block(const uint8_t* record, int, int row, uint8_t* block) {
    Points8 p{};
    for (int g = 0; g < 8; g++) {
      uint32_t pair[4];
      for (int i = 0; i < 3; i++) pair[i] = load_as<uint32_t>(Base::codes(record, g) + i * 64 + row * 4);
      pair[3] = (pair[0] >> 6 & 0x03030303u) | (pair[1] >> 3 & 0x18181818u) | (pair[2] >> 4 & 0x04040404u) |
                (pair[2] >> 2 & 0x20202020u);
      for (int i = 0; i < 4; i++) {
        p.index[g * 4 + i] = Format::kDigits.find(pair[i]);
        p.signs[g * 4 + i] = collect_signs(pair[i] >> 2) | collect_signs(pair[i] >> 5) << 4;
      }
    }
    for (int i = 0; i < SCALES; i++)
      p.scales |= uint64_t{load_as<uint32_t>(record + Base::kWords + i * 64 + row * 4)} << (32 * i);
    std::memcpy(block, record + Base::kScaleBytes + row * 2, 2);
    Format::put(block, p);
  }
  static void dequantize(const uint8_t* p, float* out) {
    const float d = half_to_float(load_as<uint16_t>(p));
    const uint64_t scales = Format::scales(p);
    for (int s = 0; s < 64; s++) {
      const float scale = d * (0.5f + static_cast<float>(scales >> (s * SCALES / 8 * 4) & 15)) * 0.25f;
      put_signed(out + s * 4, scale, Format::kGrid.words[s % 2][Format::index(p, s / 2)],
                 Format::signs(p, s / 2) >> (s % 2 * 4));
    }
  }
};

// Eight sign indices and scales of IQ2_XXS and IQ3_XXS: a word per group, four 7-bit sign indices and a 4-bit scale.
template <int FIRST, int STRIDE>
struct SignWords {
  KT_INLINE static uint32_t word(const uint8_t* block, int group) {
    return load_as<uint32_t>(block + FIRST + group * STRIDE);
  }
  KT_INLINE static uint32_t signs(const uint8_t* block, int i) {
    return kEvenSigns.signs[word(block, i / 4) >> (i % 4 * 7) & 127];
  }
  KT_INLINE static uint64_t scales(const uint8_t* block) {
    uint64_t scales = 0;
    KT_UNROLL for (int g = 0; g < 8; g++)
      scales |= uint64_t{word(block, g) >> 28} << (4 * g);
    return scales;
  }
  KT_INLINE static void put(uint8_t* block, const uint32_t* signs, uint64_t scales) {
    for (int g = 0; g < 8; g++) {
      uint32_t w = static_cast<uint32_t>(scales >> (4 * g) & 15) << 28;
      for (int i = 0; i < 4; i++) w |= (signs[g * 4 + i] & 127) << (i * 7);
      std::memcpy(block + FIRST + g * STRIDE, &w, 4);
    }
  }
};

// Per group: four index bytes and a word of signs.
struct IQ2_XXS : IQ2<IQ2_XXS, 1> {
  static constexpr int kBlockBytes = sizeof(BlockIQ2_XXS);
  static constexpr auto& kGrid = kIQ2_XXS;
  static constexpr auto& kDigits = kDigitsOfIQ2_XXS;
  using Words = SignWords<6, 8>;

  KT_INLINE static uint32_t index(const uint8_t* block, int i) { return block[2 + i / 4 * 8 + i % 4]; }
  KT_INLINE static uint32_t signs(const uint8_t* block, int i) { return Words::signs(block, i); }
  KT_INLINE static uint64_t scales(const uint8_t* block) { return Words::scales(block); }
  KT_INLINE static void put(uint8_t* block, const Points8& p) {
    for (int i = 0; i < 32; i++) block[2 + i / 4 * 8 + i % 4] = static_cast<uint8_t>(p.index[i]);
    Words::put(block, p.signs, p.scales);
  }
};

// Per eight elements 9 bits of index and a 7-bit sign index; a 4-bit scale per 16.
struct IQ2_XS : IQ2<IQ2_XS, 2> {
  static constexpr int kBlockBytes = sizeof(BlockIQ2_XS);
  static constexpr auto& kGrid = kIQ2_XS;
  static constexpr auto& kDigits = kDigitsOfIQ2_XS;

  KT_INLINE static uint32_t index(const uint8_t* block, int i) { return load_as<uint16_t>(block + 2 + i * 2) & 511; }
  KT_INLINE static uint32_t signs(const uint8_t* block, int i) { return kEvenSigns.signs[block[3 + i * 2] >> 1]; }
  KT_INLINE static uint64_t scales(const uint8_t* block) { return load_as<uint64_t>(block + 66); }
  KT_INLINE static void put(uint8_t* block, const Points8& p) {
    for (int i = 0; i < 32; i++) {
      const uint32_t q = p.index[i] | (p.signs[i] & 127) << 9;
      std::memcpy(block + 2 + i * 2, &q, 2);
    }
    std::memcpy(block + 66, &p.scales, 8);
  }
};

// 32 low bytes of indices, 32 of signs, 8 with two high index bits for each eight elements, 8 with a scale per 16.
struct IQ2_S : IQ2<IQ2_S, 2> {
  static constexpr int kBlockBytes = sizeof(BlockIQ2_S);
  static constexpr auto& kGrid = kIQ2_S;
  static constexpr auto& kDigits = kDigitsOfIQ2_S;

  KT_INLINE static uint32_t index(const uint8_t* block, int i) {
    return block[2 + i] | (block[66 + i / 4] >> (i % 4 * 2) & 3u) << 8;
  }
  KT_INLINE static uint32_t signs(const uint8_t* block, int i) { return block[34 + i]; }
  KT_INLINE static uint64_t scales(const uint8_t* block) { return load_as<uint64_t>(block + 74); }
  KT_INLINE static void put(uint8_t* block, const Points8& p) {
    std::memset(block + 66, 0, 8);
    for (int i = 0; i < 32; i++) {
      block[2 + i] = static_cast<uint8_t>(p.index[i]);
      block[34 + i] = static_cast<uint8_t>(p.signs[i]);
      block[66 + i / 4] = static_cast<uint8_t>(block[66 + i / 4] | p.index[i] >> 8 << (i % 4 * 2));
    }
    std::memcpy(block + 74, &p.scales, 8);
  }
};

// ---------------------------------------------------------------- IQ3

struct Points4 {
  uint32_t index[64], signs[32];  // signs of eight elements
  uint64_t scales;
};

template <class Format, int OFFSET>
struct IQ3 : Expanded<256, 1, 0, OFFSET, 2 * OFFSET, 1> {
  using Base = Expanded<256, 1, 0, OFFSET, 2 * OFFSET, 1>;

  template <int S>
  KT_INLINE static I32 code(const uint8_t* record, int group, int v) {
    return lookup16(table16(Format::kCodes.code), nibble<S>(Base::codes(record, group), v));
  }
  KT_INLINE static F32 scale(const uint8_t* record, int group, int, int v) {
    const I32 s = band(Base::nibbles_from(record, group, v), splat_i32(15));
    return mul(Base::d(record, v), fma(to_f32(s), set1(Format::kStep), set1(0.5f * Format::kStep)));
  }
  KT_INLINE static void pack_block(const uint8_t* block, uint8_t* record, int, int row) {
    auto step = [&](int s) KT_ALWAYS_INLINE_LAMBDA {
      return Format::kDigits.word[Format::index(block, s)] | spread_signs(Format::signs(block, s / 2) >> (s % 2 * 4))
                                                                 << 3;
    };
    KT_UNROLL for (int g = 0; g < 8; g++) {
      KT_UNROLL for (int j = 0; j < 4; j++) {
        const uint32_t word = step(g * 8 + j) | step(g * 8 + j + 4) << 4;
        std::memcpy(Base::codes(record, g) + j * 64 + row * 4, &word, 4);
      }
    }
    const uint32_t scales = static_cast<uint32_t>(Format::scales(block));
    std::memcpy(record + Base::kWords + row * 4, &scales, 4);
    Base::put_d(record, row, load_as<uint16_t>(block));
  }
  KT_INLINE static void unpack_block(const uint8_t* record, int, int row, uint8_t* block) {
    Points4 p{};
    for (int s = 0; s < 64; s++) {
      const uint8_t* words = Base::codes(record, s / 8) + s % 4 * 64;
      const uint32_t step = load_as<uint32_t>(words + row * 4) >> (s / 4 % 2 * 4);
      p.index[s] = Format::kDigits.find(step);
      p.signs[s / 2] |= collect_signs(step >> 3) << (s % 2 * 4);
    }
    p.scales = load_as<uint32_t>(record + Base::kWords + row * 4);
    std::memcpy(block, record + Base::kScaleBytes + row * 2, 2);
    Format::put(block, p);
  }
  static void dequantize(const uint8_t* p, float* out) {
    const float d = half_to_float(load_as<uint16_t>(p));
    const uint64_t scales = Format::scales(p);
    for (int s = 0; s < 64; s++) {
      const float scale = d * (0.5f + static_cast<float>(scales >> (s / 8 * 4) & 15)) * Format::kStep;
      put_signed(out + s * 4, scale, Format::kGrid.words[0][Format::index(p, s)],
                 Format::signs(p, s / 2) >> (s % 2 * 4));
    }
  }
};

// 64 index bytes, then a word of signs for each group. Scale d * (0.5 + s) / 2.
struct IQ3_XXS : IQ3<IQ3_XXS, 62> {
  static constexpr int kBlockBytes = sizeof(BlockIQ3_XXS);
  static constexpr auto& kGrid = kIQ3_XXS;
  static constexpr auto& kDigits = kDigitsOfIQ3_XXS;
  static constexpr auto& kCodes = kCodesIQ3_XXS;
  static constexpr float kStep = 0.5f;
  using Words = SignWords<66, 4>;

  KT_INLINE static uint32_t index(const uint8_t* block, int s) { return block[2 + s]; }
  KT_INLINE static uint32_t signs(const uint8_t* block, int i) { return Words::signs(block, i); }
  KT_INLINE static uint64_t scales(const uint8_t* block) { return Words::scales(block); }
  KT_INLINE static void put(uint8_t* block, const Points4& p) {
    for (int s = 0; s < 64; s++) block[2 + s] = static_cast<uint8_t>(p.index[s]);
    Words::put(block, p.signs, p.scales);
  }
};

// 64 low bytes of indices, 8 with a high bit for each four elements, 32 of signs, 4 with the scales of two groups.
// Scale d * (1 + 2s).
struct IQ3_S : IQ3<IQ3_S, 15> {
  static constexpr int kBlockBytes = sizeof(BlockIQ3_S);
  static constexpr auto& kGrid = kIQ3_S;
  static constexpr auto& kDigits = kDigitsOfIQ3_S;
  static constexpr auto& kCodes = kCodesIQ3_S;
  static constexpr float kStep = 2.f;

  KT_INLINE static uint32_t index(const uint8_t* block, int s) {
    return block[2 + s] | (block[66 + s / 8] >> (s % 8) & 1u) << 8;
  }
  KT_INLINE static uint32_t signs(const uint8_t* block, int i) { return block[74 + i]; }
  KT_INLINE static uint64_t scales(const uint8_t* block) { return load_as<uint32_t>(block + 106); }
  KT_INLINE static void put(uint8_t* block, const Points4& p) {
    std::memset(block + 66, 0, 8);
    for (int s = 0; s < 64; s++) {
      block[2 + s] = static_cast<uint8_t>(p.index[s]);
      block[66 + s / 8] = static_cast<uint8_t>(block[66 + s / 8] | p.index[s] >> 8 << (s % 8));
    }
    for (int i = 0; i < 32; i++) block[74 + i] = static_cast<uint8_t>(p.signs[i]);
    std::memcpy(block + 106, &p.scales, 4);
  }
};

// ---------------------------------------------------------------- IQ1

// w = dl * (g +- 1/8) = dl / 8 * (8g +- 1). Codes 8(g + 1) + (up ? 2 : 0) = 8g +- 1 + 9.
template <class Format, int PLANES, int SCALES>
struct IQ1 : Expanded<128, 1, PLANES, 9, 18, SCALES> {
  using Base = Expanded<128, 1, PLANES, 9, 18, SCALES>;

  KT_INLINE static F32 eighth_of(F32 d, I32 scale) { return mul(d, fma(to_f32(scale), set1(0.25f), set1(0.125f))); }
  // Crumb i of half j: bits 4 * (i % 2) of pair 2j + i / 2, where a pair is steps 2l and 2l + 1 in the low nibbles.
  KT_INLINE static void pack_codes(const uint8_t* block, uint8_t* record, int row) {
    KT_UNROLL for (int j = 0; j < 16; j++) {
      const uint32_t word =
          kDigitsOfIQ1.word[Format::index(block, 2 * j)] | kDigitsOfIQ1.word[Format::index(block, 2 * j + 1)] << 4;
      std::memcpy(record + j * 64 + row * 4, &word, 4);
    }
  }
  KT_INLINE static uint32_t unpack_index(const uint8_t* record, int row, int i) {
    return kDigitsOfIQ1.find(load_as<uint32_t>(record + i / 2 * 64 + row * 4) >> (i % 2 * 4));
  }
  // Four elements of a block, as the reference forms them.
  KT_INLINE static void put_eighths(float* out, float scale, uint32_t index, int half, bool down) {
    for (int i = 0; i < 4; i++) {
      const float g = static_cast<float>(kIQ1.words[half][index] >> (8 * i) & 255) - 1.f;
      out[i] = scale * (g + (down ? -0.125f : 0.125f));
    }
  }
};

// 32 low bytes of indices; for each group two bytes: 4 x 3 high index bits, a 3-bit scale, the direction.
struct IQ1_S : IQ1<IQ1_S, 0, 1> {
  static constexpr int kBlockBytes = sizeof(BlockIQ1_S);

  template <int S>
  KT_INLINE static I32 code(const uint8_t* record, int group, int v) {
    const I32 nibble = lookup16(nibbles_from(record, group, v), table16(kByte0));
    const I32 up = bxor(band(shift_right_16<2>(nibble), splat_i8(2)), splat_i8(2));
    return or_crumb<S, 3>(up, codes(record, group), v);
  }
  KT_INLINE static F32 scale(const uint8_t* record, int group, int, int v) {
    return eighth_of(d(record, v), band(nibbles_from(record, group, v), splat_i32(7)));
  }
  KT_INLINE static uint32_t high(const uint8_t* block, int group) { return load_as<uint16_t>(block + 34 + group * 2); }
  KT_INLINE static uint32_t index(const uint8_t* block, int i) {
    return block[2 + i] | (high(block, i / 4) >> (i % 4 * 3) & 7) << 8;
  }
  KT_INLINE static void pack_block(const uint8_t* block, uint8_t* record, int, int row) {
    pack_codes(block, record, row);
    uint32_t word = 0;
    KT_UNROLL for (int g = 0; g < 8; g++)
      word |= high(block, g) >> 12 << (4 * g);
    std::memcpy(record + kWords + row * 4, &word, 4);
    put_d(record, row, load_as<uint16_t>(block));
  }
  KT_INLINE static void unpack_block(const uint8_t* record, int, int row, uint8_t* block) {
    const uint32_t word = load_as<uint32_t>(record + kWords + row * 4);
    std::memcpy(block, record + kScaleBytes + row * 2, 2);
    for (int g = 0; g < 8; g++) {
      uint32_t h = (word >> (4 * g) & 15) << 12;
      for (int i = 0; i < 4; i++) {
        const uint32_t index = unpack_index(record, row, g * 4 + i);
        block[2 + g * 4 + i] = static_cast<uint8_t>(index);
        h |= index >> 8 << (i * 3);
      }
      std::memcpy(block + 34 + g * 2, &h, 2);
    }
  }
  static void dequantize(const uint8_t* p, float* out) {
    const float d = half_to_float(load_as<uint16_t>(p));
    for (int s = 0; s < 64; s++) {
      const uint32_t h = high(p, s / 8);
      put_eighths(out + s * 4, d * static_cast<float>(2 * (h >> 12 & 7) + 1), index(p, s / 2), s % 2, h >> 15);
    }
  }
};

// 32 low bytes of indices; 16 with a nibble for each eight elements: 3 high index bits and the direction; four 16-bit
// words, each with four 3-bit scales and four bits of d. Planes: the scales alone, in order.
struct IQ1_M : IQ1<IQ1_M, 6, 2> {
  static constexpr int kBlockBytes = sizeof(BlockIQ1_M);

  template <int S>
  KT_INLINE static I32 code(const uint8_t* record, int group, int v) {
    const I32 down = lookup16(nibbles_from(record, group, v), table16(kByte0));  // bit l: steps 2l and 2l + 1
    const I32 up = band(shift_16<1 - S / 2>(bxor(down, splat_i8(15))), splat_i8(2));
    return or_crumb<S, 3>(up, codes(record, group), v);
  }
  // The bits 6 * group + 3 * half of the six bytes, maybe from two of them. (The last ones end with the sixth.)
  KT_INLINE static F32 scale(const uint8_t* record, int group, int half, int v) {
    const int bit = group * 6 + half * 3;
    const uint8_t* plane = record + kPlanes + bit / 8 * 16 + v * kLanes;
    const I32 bits = bor(load_u8(plane), shift_left_16<8>(load_u8(plane + 16)));
    return eighth_of(d(record, v), band(shift_right_32(bits, bit % 8), splat_i32(7)));
  }
  KT_INLINE static uint32_t nibble_of(const uint8_t* block, int i) { return block[32 + i / 2] >> (i % 2 * 4) & 15u; }
  KT_INLINE static uint32_t index(const uint8_t* block, int i) { return block[i] | (nibble_of(block, i) & 7) << 8; }

  KT_INLINE static void pack_block(const uint8_t* block, uint8_t* record, int, int row) {
    pack_codes(block, record, row);
    uint32_t down = 0;
    KT_UNROLL for (int i = 0; i < 32; i++)
      down |= nibble_of(block, i) >> 3 << i;
    std::memcpy(record + kWords + row * 4, &down, 4);
    uint64_t scales = 0;
    uint32_t d = 0;
    for (int i = 0; i < 4; i++) {
      const uint32_t s = load_as<uint16_t>(block + 48 + i * 2);
      scales |= static_cast<uint64_t>(s & 0xFFF) << (i * 12);
      d |= (s >> 12) << (i * 4);
    }
    for (int i = 0; i < 6; i++) record[kPlanes + i * 16 + row] = static_cast<uint8_t>(scales >> (i * 8));
    put_d(record, row, d);
  }
  KT_INLINE static void unpack_block(const uint8_t* record, int, int row, uint8_t* block) {
    const uint32_t down = load_as<uint32_t>(record + kWords + row * 4);
    std::memset(block + 32, 0, 16);
    for (int i = 0; i < 32; i++) {
      const uint32_t index = unpack_index(record, row, i), nibble = index >> 8 | (down >> i & 1) << 3;
      block[i] = static_cast<uint8_t>(index);
      block[32 + i / 2] = static_cast<uint8_t>(block[32 + i / 2] | nibble << (i % 2 * 4));
    }
    uint64_t scales = 0;
    for (int i = 0; i < 6; i++) scales |= static_cast<uint64_t>(record[kPlanes + i * 16 + row]) << (i * 8);
    const uint32_t d = load_as<uint16_t>(record + kScaleBytes + row * 2);
    for (int i = 0; i < 4; i++) {
      const uint32_t s = (scales >> (i * 12) & 0xFFF) | (d >> (i * 4) & 15) << 12;
      std::memcpy(block + 48 + i * 2, &s, 2);
    }
  }
  static void dequantize(const uint8_t* p, float* out) {
    uint32_t bits = 0;
    for (int i = 0; i < 4; i++) bits |= static_cast<uint32_t>(load_as<uint16_t>(p + 48 + i * 2) >> 12) << (i * 4);
    const float d = half_to_float(static_cast<uint16_t>(bits));
    for (int s = 0; s < 64; s++) {
      const int sc = load_as<uint16_t>(p + 48 + s / 16 * 2) >> (s / 4 % 4 * 3) & 7;
      put_eighths(out + s * 4, d * static_cast<float>(2 * sc + 1), index(p, s / 2), s % 2, nibble_of(p, s / 2) >> 3);
    }
  }
};

}  // namespace ktlinear::tinyblas::KT_TIER
