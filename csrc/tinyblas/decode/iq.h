// Formats whose codes are points of a grid: IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, IQ1_S, IQ1_M. See nibbles.h for
// what a decoder is.
//
// Four or eight elements share one index into a grid (grids.h); IQ2 and IQ3 add a sign per element, IQ1 moves a whole
// group by an eighth up or down. In grid tables and codes a step of four elements is one 32-bit word.
//
// Packed record of 256 elements of 16 rows: the block's bytes regrouped,
//   | 32-bit words, each [16 rows][4 bytes] | bytes ("planes"), each [16 rows] | 16 fp16 d | zeros up to 64 bytes |
// The zeros are 32 bytes a record (IQ1_M: none): 1088, 1216, 1344, 1600, 1792, 832 bytes for IQ2_XXS, IQ2_XS, IQ2_S,
// IQ3_XXS, IQ3_S, IQ1_S, where GGUF has 1056, 1184, 1312, 1568, 1760, 800.
#pragma once

#include "grids.h"
#include "pieces.h"

namespace ktlinear::tinyblas {

// Half h of a point is the word [h][index].
template <int HALVES, int N>
struct Grid {
  uint32_t words[HALVES][N];
};
// meaning[digit] * factor + offset, one byte an element.
template <int HALVES, int N, int DIGITS>
consteval Grid<HALVES, N> make_grid(const uint16_t (&points)[N], const int (&meaning)[DIGITS], int factor = 1,
                                    int offset = 0) {
  constexpr int bits = 16 / (HALVES * 4);
  Grid<HALVES, N> grid{};
  for (int i = 0; i < N; i++)
    for (int e = 0; e < HALVES * 4; e++) {
      const int value = meaning[points[i] >> (bits * e) & ((1 << bits) - 1)] * factor + offset;
      grid.words[e / 4][i] |= static_cast<uint32_t>(value) << (e % 4 * 8);
    }
  return grid;
}
inline constexpr auto kIQ2_XXS = make_grid<2>(kGridIQ2_XXS, kDigitsIQ2_XXS);
inline constexpr auto kIQ2_XS = make_grid<2>(kGridIQ2_XS, kDigitsIQ2_XS);
inline constexpr auto kIQ2_S = make_grid<2>(kGridIQ2_S, kDigitsIQ2_S);
inline constexpr auto kIQ3_XXS = make_grid<1>(kGridIQ3_XXS, kDigitsIQ3_XXS);
inline constexpr auto kIQ3_S = make_grid<1>(kGridIQ3_S, kDigitsIQ3_S);
inline constexpr auto kIQ1 = make_grid<2>(kGridIQ1, kDigitsIQ1, 8, 8);  // 8 * (g + 1)

template <int N>
struct Words {
  uint32_t word[N];
};
// A byte of ones where an element is negative, for four sign bits.
consteval uint32_t sign_mask(uint32_t bits) {
  uint32_t mask = 0;
  for (int i = 0; i < 4; i++) mask |= (bits >> i & 1) * (0xFFu << (8 * i));
  return mask;
}
consteval Words<16> make_sign_masks() {
  Words<16> t{};
  for (uint32_t i = 0; i < 16; i++) t.word[i] = sign_mask(i);
  return t;
}
// The upper four signs of a 7-bit sign index: the eighth sign makes the number of negative elements even.
consteval Words<128> make_even_sign_masks() {
  Words<128> t{};
  for (uint32_t i = 0; i < 128; i++) {
    uint32_t parity = 0;
    for (int b = 0; b < 7; b++) parity ^= i >> b & 1;
    t.word[i] = sign_mask(i >> 4 | parity << 3);
  }
  return t;
}
// IQ1: index bit 3 set moves a group down: 8 * (g + 1) to 8 * g - 1 + 9, else to 8 * g + 1 + 9.
consteval Words<16> make_shifts() {
  Words<16> t{};
  for (uint32_t i = 0; i < 8; i++) t.word[i] = 0x02020202u;
  return t;
}
inline constexpr Words<16> kSignMasks = make_sign_masks(), kShifts = make_shifts();
inline constexpr Words<128> kEvenSignMasks = make_even_sign_masks();

}  // namespace ktlinear::tinyblas

namespace ktlinear::tinyblas::KT_TIER {

// `Format` says where in a block word i and plane i begin: word_at(i), plane_at(i); d comes first unless it packs
// itself.
template <class Format, int PLANES, int WORDS, int OFFSET, int MAX_CODE, int SCALES>
struct Regrouped {
  static constexpr bool kHasMinimum = false;
  static constexpr int kOffset = OFFSET, kMaxCode = MAX_CODE, kGroups = 8, kScales = SCALES, kDirectRows = 4,
                       kBlock = 256;
  static constexpr int kPlanes = WORDS * 64, kScaleBytes = kPlanes + PLANES * 16,
                       kRecordBytes = (kScaleBytes + 32 + 63) / 64 * 64;

  KT_INLINE static F32 minimum(const uint8_t*, int, int, int) { return zero(); }
  KT_INLINE static F32 d(const uint8_t* record, int v) { return load_halves(record + kScaleBytes, v); }
  KT_INLINE static I32 plane(const uint8_t* record, int i, int v) {
    return load_u8(record + kPlanes + i * 16 + v * kLanes);
  }
  KT_INLINE static I32 word(const uint8_t* record, int i, int v) { return load_i(record + i * 64 + v * kVectorBytes); }
  // Element codes from magnitudes and signs: offset + w or offset - w, byte by byte.
  KT_INLINE static I32 signed_code(I32 magnitudes, I32 mask) {
    return sub_i8(bxor(magnitudes, mask), sub_i8(mask, splat_i8(kOffset)));
  }
  // Four of the eight signs of a 7-bit index, or of eight sign bits.
  template <int HALF>
  KT_INLINE static I32 even_signs(I32 index) {
    return HALF ? gather_i32(kEvenSignMasks.word, index) : gather_i32(kSignMasks.word, band(index, splat_i32(15)));
  }
  template <int HALF>
  KT_INLINE static I32 direct_signs(I32 bits) {
    return gather_i32(kSignMasks.word, HALF ? shift_right_32<4>(bits) : band(bits, splat_i32(15)));
  }

  KT_INLINE static void pack_block(const uint8_t* block, uint8_t* record, int, int row) {
    for (int i = 0; i < WORDS; i++) std::memcpy(record + i * 64 + row * 4, block + Format::word_at(i), 4);
    for (int i = 0; i < PLANES; i++) record[kPlanes + i * 16 + row] = block[Format::plane_at(i)];
    std::memcpy(record + kScaleBytes + row * 2, block, 2);
    if constexpr (kScaleBytes + 32 < kRecordBytes) std::memset(record + kScaleBytes + 32 + row * 2, 0, 2);
  }
  KT_INLINE static void unpack_block(const uint8_t* record, int, int row, uint8_t* block) {
    for (int i = 0; i < WORDS; i++) std::memcpy(block + Format::word_at(i), record + i * 64 + row * 4, 4);
    for (int i = 0; i < PLANES; i++) block[Format::plane_at(i)] = record[kPlanes + i * 16 + row];
    std::memcpy(block, record + kScaleBytes + row * 2, 2);
  }
  static constexpr int word_at(int) { return 0; }
  static constexpr int plane_at(int i) { return 2 + i; }

  // Four elements of a block: scale * (+- magnitudes).
  KT_INLINE static void put_signed(float* out, float scale, uint32_t magnitudes, uint32_t mask) {
    for (int i = 0; i < 4; i++) {
      const float w = scale * static_cast<float>(magnitudes >> (8 * i) & 255);
      out[i] = mask >> (8 * i) & 1 ? -w : w;
    }
  }
  KT_INLINE static uint32_t even_mask(uint32_t index, int half) {
    return half ? kEvenSignMasks.word[index] : kSignMasks.word[index & 15];
  }
  KT_INLINE static uint32_t direct_mask(uint32_t bits, int half) { return kSignMasks.word[bits >> (half * 4) & 15]; }
};

// Per group: four index bytes; word A: four 7-bit sign indices, a 4-bit scale. Scale d * (0.5 + A >> 28) / 4.
struct IQ2_XXS : Regrouped<IQ2_XXS, 32, 8, 43, 86, 1> {
  static constexpr int kBlockBytes = sizeof(BlockIQ2_XXS);
  static constexpr int plane_at(int i) { return 2 + i / 4 * 8 + i % 4; }
  static constexpr int word_at(int i) { return 2 + i * 8 + 4; }

  template <int S>
  KT_INLINE static I32 code(const uint8_t* record, int group, int v) {
    const I32 signs = band(shift_right_32<S / 2 * 7>(word(record, group, v)), splat_i32(127));
    return signed_code(gather_i32(kIQ2_XXS.words[S % 2], plane(record, group * 4 + S / 2, v)),
                       even_signs<S % 2>(signs));
  }
  KT_INLINE static F32 scale(const uint8_t* record, int group, int, int v) {
    const F32 s = to_f32(shift_right_32<28>(word(record, group, v)));
    return mul(mul(d(record, v), add(s, set1(0.5f))), set1(0.25f));
  }
  static void dequantize(const uint8_t* p, float* out) {
    const float d = half_to_float(load_as<uint16_t>(p));
    for (int s = 0; s < 64; s++) {
      const uint32_t a = load_as<uint32_t>(p + word_at(s / 8));
      const float scale = d * (0.5f + static_cast<float>(a >> 28)) * 0.25f;
      put_signed(out + s * 4, scale, kIQ2_XXS.words[s % 2][p[plane_at(s / 2)]],
                 even_mask(a >> (s / 2 % 4 * 7) & 127, s % 2));
    }
  }
};

// Per eight elements 9 bits of index and a 7-bit sign index (planes: low byte, high byte); a 4-bit scale per 16.
struct IQ2_XS : Regrouped<IQ2_XS, 72, 0, 43, 86, 2> {
  static constexpr int kBlockBytes = sizeof(BlockIQ2_XS);

  template <int S>
  KT_INLINE static I32 code(const uint8_t* record, int group, int v) {
    const I32 low = plane(record, group * 8 + S / 2 * 2, v), high = plane(record, group * 8 + S / 2 * 2 + 1, v);
    const I32 index = bor(low, shift_left_16<8>(band(high, splat_i32(1))));
    return signed_code(gather_i32(kIQ2_XS.words[S % 2], index), even_signs<S % 2>(shift_right_32<1>(high)));
  }
  KT_INLINE static F32 scale(const uint8_t* record, int group, int half, int v) {
    const I32 s = band(shift_right_32(plane(record, 64 + group, v), half * 4), splat_i32(15));
    return mul(mul(d(record, v), add(to_f32(s), set1(0.5f))), set1(0.25f));
  }
  static void dequantize(const uint8_t* p, float* out) {
    const float d = half_to_float(load_as<uint16_t>(p));
    for (int s = 0; s < 64; s++) {
      const uint32_t q = load_as<uint16_t>(p + 2 + s / 2 * 2);
      const float scale = d * (0.5f + static_cast<float>(p[66 + s / 8] >> (s / 4 % 2 * 4) & 15)) * 0.25f;
      put_signed(out + s * 4, scale, kIQ2_XS.words[s % 2][q & 511], even_mask(q >> 9, s % 2));
    }
  }
};

// Planes: 32 low bytes of indices, 32 of sign bits, 8 with two high index bits for each eight elements, 8 with a scale
// per 16.
struct IQ2_S : Regrouped<IQ2_S, 80, 0, 43, 86, 2> {
  static constexpr int kBlockBytes = sizeof(BlockIQ2_S);

  template <int S>
  KT_INLINE static I32 code(const uint8_t* record, int group, int v) {
    constexpr int l = S / 2;
    const I32 high = band(shift_16<8 - 2 * l>(plane(record, 64 + group, v)), splat_i32(0x300));
    const I32 words = gather_i32(kIQ2_S.words[S % 2], bor(plane(record, group * 4 + l, v), high));
    return signed_code(words, direct_signs<S % 2>(plane(record, 32 + group * 4 + l, v)));
  }
  KT_INLINE static F32 scale(const uint8_t* record, int group, int half, int v) {
    const I32 s = band(shift_right_32(plane(record, 72 + group, v), half * 4), splat_i32(15));
    return mul(mul(d(record, v), add(to_f32(s), set1(0.5f))), set1(0.25f));
  }
  static void dequantize(const uint8_t* p, float* out) {
    const float d = half_to_float(load_as<uint16_t>(p));
    for (int s = 0; s < 64; s++) {
      const uint32_t index = p[2 + s / 2] | (p[66 + s / 8] >> (s / 2 % 4 * 2) & 3u) << 8;
      const float scale = d * (0.5f + static_cast<float>(p[74 + s / 8] >> (s / 4 % 2 * 4) & 15)) * 0.25f;
      put_signed(out + s * 4, scale, kIQ2_S.words[s % 2][index], direct_mask(p[34 + s / 2], s % 2));
    }
  }
};

// Per group: eight index bytes, one for each step; word A as in IQ2_XXS. Scale d * (0.5 + A >> 28) / 2.
struct IQ3_XXS : Regrouped<IQ3_XXS, 64, 8, 62, 124, 1> {
  static constexpr int kBlockBytes = sizeof(BlockIQ3_XXS);
  static constexpr int word_at(int i) { return 66 + i * 4; }

  template <int S>
  KT_INLINE static I32 code(const uint8_t* record, int group, int v) {
    const I32 signs = band(shift_right_32<S / 2 * 7>(word(record, group, v)), splat_i32(127));
    return signed_code(gather_i32(kIQ3_XXS.words[0], plane(record, group * 8 + S, v)), even_signs<S % 2>(signs));
  }
  KT_INLINE static F32 scale(const uint8_t* record, int group, int, int v) {
    const F32 s = to_f32(shift_right_32<28>(word(record, group, v)));
    return mul(mul(d(record, v), add(s, set1(0.5f))), set1(0.5f));
  }
  static void dequantize(const uint8_t* p, float* out) {
    const float d = half_to_float(load_as<uint16_t>(p));
    for (int s = 0; s < 64; s++) {
      const uint32_t a = load_as<uint32_t>(p + word_at(s / 8));
      const float scale = d * (0.5f + static_cast<float>(a >> 28)) * 0.5f;
      put_signed(out + s * 4, scale, kIQ3_XXS.words[0][p[2 + s]], even_mask(a >> (s / 2 % 4 * 7) & 127, s % 2));
    }
  }
};

// Planes: 64 low bytes of indices, 8 with a high index bit for each step, 32 of sign bits, 4 with the scales of two
// groups.
struct IQ3_S : Regrouped<IQ3_S, 108, 0, 15, 30, 1> {
  static constexpr int kBlockBytes = sizeof(BlockIQ3_S);

  template <int S>
  KT_INLINE static I32 code(const uint8_t* record, int group, int v) {
    const I32 high = band(shift_16<8 - S>(plane(record, 64 + group, v)), splat_i32(0x100));
    const I32 words = gather_i32(kIQ3_S.words[0], bor(plane(record, group * 8 + S, v), high));
    return signed_code(words, direct_signs<S % 2>(plane(record, 72 + group * 4 + S / 2, v)));
  }
  KT_INLINE static F32 scale(const uint8_t* record, int group, int, int v) {
    const I32 s = band(shift_right_32(plane(record, 104 + group / 2, v), group % 2 * 4), splat_i32(15));
    return mul(d(record, v), fma(to_f32(s), set1(2.f), set1(1.f)));
  }
  static void dequantize(const uint8_t* p, float* out) {
    const float d = half_to_float(load_as<uint16_t>(p));
    for (int s = 0; s < 64; s++) {
      const uint32_t index = p[2 + s] | (p[66 + s / 8] >> (s % 8) & 1u) << 8;
      const float scale = d * static_cast<float>(1 + 2 * (p[106 + s / 16] >> (s / 8 % 2 * 4) & 15));
      put_signed(out + s * 4, scale, kIQ3_S.words[0][index], direct_mask(p[74 + s / 2], s % 2));
    }
  }
};

// IQ1: w = dl * (g +- 1/8) = dl / 8 * (8g +- 1). Codes 8g +- 1 + 9.
template <class Format, int PLANES, int SCALES>
struct Eighths : Regrouped<Format, PLANES, 0, 9, 18, SCALES> {
  template <int HALF>
  KT_INLINE static I32 eighths(I32 index, I32 shift) {
    return bor(gather_i32(kIQ1.words[HALF], index), gather_i32(kShifts.word, shift));
  }
  KT_INLINE static F32 eighth_of(F32 d, I32 scale) {
    return mul(mul(d, fma(to_f32(scale), set1(2.f), set1(1.f))), set1(0.125f));
  }
  // Four elements of a block, as the reference forms them.
  KT_INLINE static void put_eighths(float* out, float scale, uint32_t index, int half, bool down) {
    for (int i = 0; i < 4; i++) {
      const float g = static_cast<float>(kIQ1.words[half][index] >> (8 * i) & 255) * 0.125f - 1.f;
      out[i] = scale * (g + (down ? -0.125f : 0.125f));
    }
  }
};

// Planes: 32 low bytes of indices; for each group two bytes: 4 x 3 high index bits, a 3-bit scale, the direction.
struct IQ1_S : Eighths<IQ1_S, 48, 1> {
  static constexpr int kBlockBytes = sizeof(BlockIQ1_S);

  template <int S>
  KT_INLINE static I32 code(const uint8_t* record, int group, int v) {
    constexpr int l = S / 2;
    const I32 low = plane(record, 32 + group * 2, v), high = plane(record, 33 + group * 2, v);
    const I32 bits = band(shift_16<8 - 3 * l>(bor(low, shift_left_16<8>(high))), splat_i32(0x700));
    return eighths<S % 2>(bor(plane(record, group * 4 + l, v), bits), shift_right_32<4>(high));
  }
  KT_INLINE static F32 scale(const uint8_t* record, int group, int, int v) {
    return eighth_of(d(record, v), band(shift_right_32<4>(plane(record, 33 + group * 2, v)), splat_i32(7)));
  }
  static void dequantize(const uint8_t* p, float* out) {
    const float d = half_to_float(load_as<uint16_t>(p));
    for (int s = 0; s < 64; s++) {
      const uint32_t h = load_as<uint16_t>(p + 34 + s / 8 * 2);
      const uint32_t index = p[2 + s / 2] | (h >> (s / 2 % 4 * 3) & 7) << 8;
      put_eighths(out + s * 4, d * static_cast<float>(2 * (h >> 12 & 7) + 1), index, s % 2, h >> 15);
    }
  }
};

// Planes: 32 low bytes of indices; 16 with a nibble for each eight elements: 3 high index bits and the direction; 6
// bytes with sixteen 3-bit scales, in order. The four upper nibbles of the block's scales are the bits of d.
struct IQ1_M : Eighths<IQ1_M, 54, 2> {
  static constexpr int kBlockBytes = sizeof(BlockIQ1_M);

  template <int S>
  KT_INLINE static I32 code(const uint8_t* record, int group, int v) {
    constexpr int l = S / 2;
    const I32 pair = plane(record, 32 + group * 2 + l / 2, v);
    const I32 nibble = l % 2 ? shift_right_32<4>(pair) : band(pair, splat_i32(15));
    const I32 index = bor(plane(record, group * 4 + l, v), shift_left_16<8>(band(nibble, splat_i32(7))));
    return eighths<S % 2>(index, nibble);
  }
  // The bits 6 * group + 3 * half of the six bytes, maybe from two of them. (The last ones end with the sixth.)
  KT_INLINE static F32 scale(const uint8_t* record, int group, int half, int v) {
    const int bit = group * 6 + half * 3, first = 48 + bit / 8;
    const I32 bits = bor(plane(record, first, v), shift_left_16<8>(plane(record, first + 1, v)));
    return eighth_of(d(record, v), band(shift_right_32(bits, bit % 8), splat_i32(7)));
  }
  KT_INLINE static void pack_block(const uint8_t* block, uint8_t* record, int, int row) {
    uint8_t* planes = record + row;
    for (int i = 0; i < 48; i++) planes[i * 16] = block[i];
    uint64_t scales = 0;
    uint32_t d = 0;
    for (int i = 0; i < 4; i++) {
      const uint32_t s = load_as<uint16_t>(block + 48 + i * 2);
      scales |= static_cast<uint64_t>(s & 0xFFF) << (i * 12);
      d |= (s >> 12) << (i * 4);
    }
    for (int i = 0; i < 6; i++) planes[(48 + i) * 16] = static_cast<uint8_t>(scales >> (i * 8));
    std::memcpy(record + kScaleBytes + row * 2, &d, 2);
  }
  KT_INLINE static void unpack_block(const uint8_t* record, int, int row, uint8_t* block) {
    const uint8_t* planes = record + row;
    for (int i = 0; i < 48; i++) block[i] = planes[i * 16];
    uint64_t scales = 0;
    for (int i = 0; i < 6; i++) scales |= static_cast<uint64_t>(planes[(48 + i) * 16]) << (i * 8);
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
      const uint32_t nibble = p[32 + s / 4] >> (s / 2 % 2 * 4) & 15, index = p[s / 2] | (nibble & 7) << 8;
      const int sc = load_as<uint16_t>(p + 48 + s / 16 * 2) >> (s / 4 % 4 * 3) & 7;
      put_eighths(out + s * 4, d * static_cast<float>(2 * sc + 1), index, s % 2, nibble >> 3);
    }
  }
};

}  // namespace ktlinear::tinyblas::KT_TIER
