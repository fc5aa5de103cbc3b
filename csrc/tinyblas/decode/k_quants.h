// Super-blocks of 256 elements: Q2_K, Q3_K, Q4_K, Q5_K, Q6_K. See nibbles.h for what a decoder is, pieces.h for the
// pieces.
//
// Packed record, eight groups (256 elements) of 16 rows. What all groups share comes first: a group reads it anew.
//   Q2_K   1344 bytes   | 16 d | 16 -dmin | 4 x [16 rows][4] sc | m << 4 | 8 x { crumbs } |
//   Q3_K   1856 bytes   | 16 d | 32 bytes unused | 16 x [16 rows] int8 sc | 8 x { crumbs, bits } |
//   Q4_K   2368 bytes   | 16 d | 16 -dmin | 8 x [16 rows] sc | 2 x [16 rows][4] m | 8 x { nibbles } |
//   Q5_K   2880 bytes   | 16 d | 16 -dmin | 8 x [16 rows] sc | 2 x [16 rows][4] m | 8 x { nibbles, bits } |
//   Q6_K   3392 bytes   | 16 d | 32 bytes unused | 16 x [16 rows] int8 sc | 8 x { nibbles, crumbs } |
// d and dmin are fp16; dmin has its sign turned, so that a minimum is one product. sc and m of six bits are whole
// bytes, and sc lie so that a vector widens them in one instruction, m so that it takes pairs from words of four; with
// the unused bytes (records are multiples of 64) that makes Q3_K 5.5 % larger than in a GGUF file, Q4_K 2.8 %, Q5_K 2.3 %,
// Q6_K 1 %; Q2_K has the same size.
//
// GGUF keeps the bits of one element position of several groups in one byte, the packed layout those of several steps
// of one group:
//   nibbles   steps s, s + 4 of groups a, b         2 x 2     crumbs   four steps of four groups   4 x 4
//   bits      eight steps of eight groups           8 x 8
// Both ways are the same transpose of bit fields, of four elements at once in 32-bit words.
#pragma once

#include "pieces.h"

namespace ktlinear::tinyblas::KT_TIER {

// Field j of each byte of word i <-> field i of the same byte of word j; fields of BITS bits, 8 / BITS words.
template <int BITS, class Rows>
KT_INLINE void transpose_fields(typename Rows::W (&w)[8 / BITS]) {
  auto level = [&]<int SHIFT>() KT_ALWAYS_INLINE_LAMBDA {
    if constexpr (SHIFT >= BITS) {
      const auto mask = Rows::all(SHIFT == 4 ? 0x0F0F0F0Fu : SHIFT == 2 ? 0x33333333u : 0x55555555u);
      constexpr int distance = SHIFT / BITS;
      KT_UNROLL for (int i = 0; i < 8 / BITS; i++) {
        if (i & distance) continue;
        const auto t = band(bxor(shift_right_32<SHIFT>(w[i]), w[i + distance]), mask);
        w[i + distance] = bxor(w[i + distance], t);
        w[i] = bxor(w[i], shift_left_32<SHIFT>(t));
      }
    }
  };
  level.template operator()<4>();
  level.template operator()<2>();
  level.template operator()<1>();
}

// Which step is field i of part j, 64 bytes of a piece: nibbles hold steps j and j + 4, crumbs 4j to 4j + 3.
template <int BITS>
constexpr int word_of(int j, int i) {
  return BITS == 4 ? i * 4 + j : j * (8 / BITS) + i;
}

// The 8 / BITS groups that share 32 bytes of a GGUF block (at `offset`) <-> their pieces, `stride` bytes apart; get:
// `pieces` is the row's place in the first.
template <int BITS, class Rows>
KT_INLINE void put_groups(const Rows& rows, int offset, uint8_t* pieces, int stride) {
  constexpr int count = 8 / BITS;
  typename Rows::W in[2][4];
  rows.load(offset, in[0]);
  rows.load(offset + 16, in[1]);
  KT_UNROLL for (int j = 0; j < BITS; j++) {
    typename Rows::W w[count];
    KT_UNROLL for (int i = 0; i < count; i++)
      w[i] = in[word_of<BITS>(j, i) / 4][word_of<BITS>(j, i) % 4];
    transpose_fields<BITS, Rows>(w);
    KT_UNROLL for (int i = 0; i < count; i++)
      rows.put(pieces + i * stride + j * 64, w[i]);
  }
}
template <int BITS>
KT_INLINE void get_groups(const uint8_t* pieces, int stride, uint8_t* out) {
  constexpr int count = 8 / BITS;
  KT_UNROLL for (int j = 0; j < BITS; j++) {
    uint32_t w[count];
    KT_UNROLL for (int i = 0; i < count; i++)
      w[i] = load_as<uint32_t>(pieces + i * stride + j * 64);
    transpose_fields<BITS, OneRow>(w);
    KT_UNROLL for (int i = 0; i < count; i++)
      std::memcpy(out + word_of<BITS>(j, i) * 4, &w[i], 4);
  }
}

// What the records have in common.
template <class Block>
struct SuperBlock {
  static constexpr bool kHasMinimum = requires(Block b) { b.dmin; };
  static constexpr int kBlock = 256, kBlockBytes = sizeof(Block), kGroups = 8;
  static constexpr int kSubScales = 64, kCodes = kSubScales + 256;  // after 16 d and 16 -dmin, or 16 d

  KT_INLINE static F32 d(const uint8_t* record, int v) { return load_halves(record, v); }
  KT_INLINE static F32 minus_dmin(const uint8_t* record, int v) { return load_halves(record + 32, v); }
  // The 16 bytes of all rows at `index`.
  KT_INLINE static const uint8_t* sub_scales(const uint8_t* record, int index) {
    return record + kSubScales + index * 16;
  }
  // Byte `index` of [16 rows][4] bytes each, in the low bits of its row's lane; others are above it.
  KT_INLINE static I32 sub_word(const uint8_t* words, int index, int v) {
    return load_i(words + index / 4 * 64 + index % 4 + v * kLanes * 4);
  }

  // The low half of a word that holds d and, above it, dmin.
  template <class Rows>
  KT_INLINE static void put_d(const Rows& rows, uint8_t* record, typename Rows::W word) {
    rows.put_half(record, word);
    rows.put_half(record + 32, kHasMinimum ? bxor(shift_right_32<16>(word), Rows::all(0x8000)) : Rows::all(0));
  }
  KT_INLINE static void get_d(const uint8_t* record, int row, uint8_t* block) {
    std::memcpy(block + offsetof(Block, d), record + row * 2, 2);
    if constexpr (kHasMinimum) {
      const uint16_t dmin = load_as<uint16_t>(record + 32 + row * 2) ^ 0x8000;
      std::memcpy(block + offsetof(Block, dmin), &dmin, 2);
    }
  }
};

// Q4_K, Q5_K: eight sub-blocks of 32, six bits each for scale and minimum; w = d * sc * q - dmin * m.
template <class Block>
struct SixBitMinimum : SuperBlock<Block> {
  using Base = SuperBlock<Block>;
  static constexpr bool kHasBit = requires(Block b) { b.qh; };
  static constexpr int kOffset = 0, kMaxCode = kHasBit ? 31 : 15, kScales = 1, kMinimumPairs = 4;
  static constexpr int kGroupBytes = 256 + 64 * kHasBit, kRecordBytes = Base::kCodes + 8 * kGroupBytes;

  template <int S>
  KT_INLINE static I32 code(const uint8_t* record, int group, int v) {
    const uint8_t* g = record + Base::kCodes + group * kGroupBytes;
    I32 u = nibble<S>(g, v);
    if constexpr (kHasBit) u = or_bit<S, 4>(u, g + 256, v);
    return u;
  }
  KT_INLINE static I32 integer_scale(const uint8_t* record, int group, int, int v) {
    return load_u8(Base::sub_scales(record, group) + v * kLanes);
  }
  KT_INLINE static F32 scale(const uint8_t* record, int group, int, int v) {
    return mul(Base::d(record, v), to_f32(integer_scale(record, group, 0, v)));
  }
  KT_INLINE static F32 minimum(const uint8_t* record, int group, int, int v) {
    return mul(Base::minus_dmin(record, v), to_f32(band(Base::sub_word(minima(record), group, v), splat_i32(63))));
  }
  // Two minima as int16: see int8.h for which.
  template <int J>
  KT_INLINE static I32 minimum_pair(const uint8_t* record, int v) {
    return band(shift_16<-8 * (J % 2)>(load_i(minima(record) + J / 2 * 64 + v * kVectorBytes)), splat_i32(0x00FF00FF));
  }
  KT_INLINE static const uint8_t* minima(const uint8_t* record) { return Base::sub_scales(record, 8); }

  // The twelve bytes as words a, b, c: values 0..3 are the low six bits of a (scales) and b (minima); 4..7 have their
  // low four bits in the nibbles of c, their high two in the top bits of a and b.
  struct SubScales {
    uint8_t sc[8], m[8];
  };
  // The words a, b, c -> scales 0..3, 4..7, minima 0..3, 4..7.
  template <class Rows, class W>
  KT_INLINE static void unpack_scales(W a, W b, W c, W (&out)[4]) {
    const W low = Rows::all(0x0F0F0F0F), six = Rows::all(0x3F3F3F3F), high = Rows::all(0x30303030);
    out[0] = band(a, six), out[1] = bor(band(c, low), band(shift_right_32<2>(a), high));
    out[2] = band(b, six), out[3] = bor(band(shift_right_32<4>(c), low), band(shift_right_32<2>(b), high));
  }
  KT_INLINE static SubScales unpack_scales(const uint8_t* packed) {
    uint32_t words[3], out[4];
    std::memcpy(words, packed, 12);
    unpack_scales<OneRow>(words[0], words[1], words[2], out);
    SubScales s;
    std::memcpy(&s, out, 16);
    return s;
  }
  KT_INLINE static void pack_scales(const SubScales& s, uint8_t* packed) {
    const uint32_t sc = load_as<uint32_t>(s.sc), sc4 = load_as<uint32_t>(s.sc + 4);
    const uint32_t m = load_as<uint32_t>(s.m), m4 = load_as<uint32_t>(s.m + 4);
    const uint32_t words[3] = {sc | (sc4 & 0x30303030u) << 2, m | (m4 & 0x30303030u) << 2,
                               (sc4 & 0x0F0F0F0Fu) | (m4 & 0x0F0F0F0Fu) << 4};
    std::memcpy(packed, words, 12);
  }

  template <class Rows>
  KT_INLINE static void pack(const Rows& rows, uint8_t* record, int) {
    typename Rows::W head[4], s[4];
    rows.load(0, head);
    Base::put_d(rows, record, head[0]);
    unpack_scales<Rows>(head[1], head[2], head[3], s);
    KT_UNROLL for (int i = 0; i < 2; i++) {
      rows.put_bytes(record + Base::kSubScales + i * 64, s[i]);
      rows.put(record + Base::kSubScales + 128 + i * 64, s[2 + i]);
    }
    KT_UNROLL for (int i = 0; i < 4; i++)
      put_groups<4>(rows, offsetof(Block, qs) + i * 32, record + Base::kCodes + i * 2 * kGroupBytes, kGroupBytes);
    if constexpr (kHasBit) put_groups<1>(rows, offsetof(Block, qh), record + Base::kCodes + 256, kGroupBytes);
  }
  KT_INLINE static void unpack_block(const uint8_t* record, int, int row, uint8_t* block) {
    Base::get_d(record, row, block);
    SubScales s;
    KT_UNROLL for (int i = 0; i < 8; i++) {
      s.sc[i] = Base::sub_scales(record, i)[row];
      s.m[i] = minima(record)[i / 4 * 64 + row * 4 + i % 4];
    }
    pack_scales(s, block + offsetof(Block, scales));
    const uint8_t* codes = record + Base::kCodes + row * 4;
    KT_UNROLL for (int i = 0; i < 4; i++)
      get_groups<4>(codes + i * 2 * kGroupBytes, kGroupBytes, block + offsetof(Block, qs) + i * 32);
    if constexpr (kHasBit) get_groups<1>(codes + 256, kGroupBytes, block + offsetof(Block, qh));
  }

  static void dequantize(const uint8_t* p, float* out) {
    Block b;
    std::memcpy(&b, p, sizeof b);
    const float d = half_to_float(b.d), dmin = half_to_float(b.dmin);
    const SubScales s = unpack_scales(b.scales);
    for (int g = 0; g < 8; g++) {
      const float scale = d * static_cast<float>(s.sc[g]), minimum = dmin * static_cast<float>(s.m[g]);
      for (int l = 0; l < 32; l++) {
        int q = b.qs[g / 2 * 32 + l] >> (g % 2 * 4) & 15;
        if constexpr (kHasBit) q |= (b.qh[l] >> g & 1) << 4;
        out[g * 32 + l] = scale * static_cast<float>(q) - minimum;
      }
    }
  }
};

using Q4_K = SixBitMinimum<BlockQ4_K>;
using Q5_K = SixBitMinimum<BlockQ5_K>;

// Q3_K, Q6_K: sixteen sub-blocks of 16 with a signed scale; w = d * sc * (q - offset).
template <class Block>
struct SignedScales : SuperBlock<Block> {
  using Base = SuperBlock<Block>;
  static constexpr int kScales = 2;
  KT_INLINE static I32 integer_scale(const uint8_t* record, int group, int half, int v) {
    return load_s8(Base::sub_scales(record, group * 2 + half) + v * kLanes);
  }
  KT_INLINE static F32 scale(const uint8_t* record, int group, int half, int v) {
    return mul(Base::d(record, v), to_f32(integer_scale(record, group, half, v)));
  }
  KT_INLINE static F32 minimum(const uint8_t*, int, int, int) { return zero(); }
};

struct Q6_K : SignedScales<BlockQ6_K> {
  static constexpr int kOffset = 32, kMaxCode = 63, kGroupBytes = 384, kRecordBytes = kCodes + 8 * kGroupBytes;

  template <int S>
  KT_INLINE static I32 code(const uint8_t* record, int group, int v) {
    const uint8_t* g = record + kCodes + group * kGroupBytes;
    return or_crumb<S, 4>(nibble<S>(g, v), g + 256, v);
  }

  // In each half of 128, groups 0 and 2 share their bytes of low bits, as do 1 and 3; all four share those of high
  // bits.
  template <class Rows>
  KT_INLINE static void pack(const Rows& rows, uint8_t* record, int) {
    typename Rows::W w[4];
    rows.load(sizeof(BlockQ6_K) - 16, w);  // d is the last half
    put_d(rows, record, shift_right_32<16>(w[3]));
    rows.load(offsetof(BlockQ6_K, scales), w);
    KT_UNROLL for (int i = 0; i < 4; i++)
      rows.put_bytes(record + kSubScales + i * 64, w[i]);
    KT_UNROLL for (int n = 0; n < 2; n++) {
      uint8_t* codes = record + kCodes + n * 4 * kGroupBytes;
      KT_UNROLL for (int i = 0; i < 2; i++)
        put_groups<4>(rows, offsetof(BlockQ6_K, ql) + n * 64 + i * 32, codes + i * kGroupBytes, 2 * kGroupBytes);
      put_groups<2>(rows, offsetof(BlockQ6_K, qh) + n * 32, codes + 256, kGroupBytes);
    }
  }
  KT_INLINE static void unpack_block(const uint8_t* record, int, int row, uint8_t* block) {
    get_d(record, row, block);
    KT_UNROLL for (int i = 0; i < 16; i++)
      block[offsetof(BlockQ6_K, scales) + static_cast<size_t>(i)] = sub_scales(record, i)[row];
    KT_UNROLL for (int n = 0; n < 2; n++) {
      const uint8_t* codes = record + kCodes + row * 4 + n * 4 * kGroupBytes;
      KT_UNROLL for (int i = 0; i < 2; i++)
        get_groups<4>(codes + i * kGroupBytes, 2 * kGroupBytes, block + offsetof(BlockQ6_K, ql) + n * 64 + i * 32);
      get_groups<2>(codes + 256, kGroupBytes, block + offsetof(BlockQ6_K, qh) + n * 32);
    }
  }

  static void dequantize(const uint8_t* p, float* out) {
    BlockQ6_K b;
    std::memcpy(&b, p, sizeof b);
    const float d = half_to_float(b.d);
    for (int e = 0; e < 256; e++) {
      const int n = e / 128, j = e % 128 / 32, l = e % 32;
      const int low = b.ql[n * 64 + j % 2 * 32 + l] >> (j / 2 * 4) & 15, high = b.qh[n * 32 + l] >> (j * 2) & 3;
      out[e] = d * static_cast<float>(b.scales[e / 16]) * static_cast<float>((low | high << 4) - kOffset);
    }
  }
};

struct Q3_K : SignedScales<BlockQ3_K> {
  struct Folded;
  static constexpr int kOffset = 4, kMaxCode = 7, kGroupBytes = 192, kRecordBytes = kCodes + 8 * kGroupBytes;

  template <int S>
  KT_INLINE static I32 code(const uint8_t* record, int group, int v) {
    const uint8_t* g = record + kCodes + group * kGroupBytes;
    return or_bit<S, 2>(crumb<S>(g, v), g + 128, v);
  }

  // Scale j of six bits, less 32: the low four in nibble j / 8 of byte j % 8, the high two in crumb j / 4 of byte
  // 8 + j % 4.
  KT_INLINE static int scale_of(const uint8_t* packed, int j) {
    return ((packed[j % 8] >> (j / 8 * 4) & 15) | (packed[8 + j % 4] >> (j / 4 * 2) & 3) << 4) - 32;
  }
  KT_INLINE static void put_scale(uint8_t* packed, int j, int scale) {  // over zeros
    const int six = scale + 32;
    packed[j % 8] = static_cast<uint8_t>(packed[j % 8] | (six & 15) << (j / 8 * 4));
    packed[8 + j % 4] = static_cast<uint8_t>(packed[8 + j % 4] | (six >> 4 & 3) << (j / 4 * 2));
  }

  template <class Rows>
  KT_INLINE static void pack(const Rows& rows, uint8_t* record, int) {
    typename Rows::W w[4];
    rows.load(sizeof(BlockQ3_K) - 16, w);  // two bytes more, the twelve of scales, d
    put_d(rows, record, shift_right_32<16>(w[3]));
    KT_UNROLL for (int i = 0; i < 3; i++)
      w[i] = bor(shift_right_32<16>(w[i]), shift_left_32<16>(w[i + 1]));
    const auto low = Rows::all(0x0F0F0F0F), two = Rows::all(0x03030303), sign = Rows::all(0x20202020);
    for_steps<0, 4>([&]<int I>() KT_ALWAYS_INLINE_LAMBDA {
      const auto six =
          bor(band(shift_right_32<I / 2 * 4>(w[I % 2]), low), shift_left_32<4>(band(shift_right_32<I * 2>(w[2]), two)));
      // less 32: bit 5 turned, then copied to the two above it
      const auto turned = bxor(six, sign), top = band(turned, sign);
      rows.put_bytes(record + kSubScales + I * 64, bor(turned, bor(shift_left_32<1>(top), shift_left_32<2>(top))));
    });
    KT_UNROLL for (int n = 0; n < 2; n++)
      put_groups<2>(rows, offsetof(BlockQ3_K, qs) + n * 32, record + kCodes + n * 4 * kGroupBytes, kGroupBytes);
    put_groups<1>(rows, offsetof(BlockQ3_K, hmask), record + kCodes + 128, kGroupBytes);
  }
  KT_INLINE static void unpack_block(const uint8_t* record, int, int row, uint8_t* block) {
    get_d(record, row, block);
    std::memset(block + offsetof(BlockQ3_K, scales), 0, 12);
    KT_UNROLL for (int j = 0; j < 16; j++)
      put_scale(block + offsetof(BlockQ3_K, scales), j, sub_scales(record, j)[row]);
    const uint8_t* codes = record + kCodes + row * 4;
    KT_UNROLL for (int n = 0; n < 2; n++)
      get_groups<2>(codes + n * 4 * kGroupBytes, kGroupBytes, block + offsetof(BlockQ3_K, qs) + n * 32);
    get_groups<1>(codes + 128, kGroupBytes, block + offsetof(BlockQ3_K, hmask));
  }

  static void dequantize(const uint8_t* p, float* out) {
    BlockQ3_K b;
    std::memcpy(&b, p, sizeof b);
    const float d = half_to_float(b.d);
    for (int e = 0; e < 256; e++) {
      const int n = e / 128, j = e % 128 / 32, l = e % 32;
      const int q = (b.qs[n * 32 + l] >> (j * 2) & 3) | (b.hmask[l] >> (n * 4 + j) & 1) << 2;
      out[e] = d * static_cast<float>(scale_of(b.scales, e / 16)) * static_cast<float>(q - kOffset);
    }
  }
};

// Sixteen sub-blocks of 16, four bits each for scale and minimum; w = d * sc * q - dmin * m.
struct Q2_K : SuperBlock<BlockQ2_K> {
  struct Folded;
  static constexpr int kOffset = 0, kMaxCode = 3, kScales = 2, kMinimumPairs = 8, kGroupBytes = 128,
                       kRecordBytes = kCodes + 8 * kGroupBytes;

  template <int S>
  KT_INLINE static I32 code(const uint8_t* record, int group, int v) {
    return crumb<S>(record + kCodes + group * kGroupBytes, v);
  }
  KT_INLINE static I32 integer_scale(const uint8_t* record, int group, int half, int v) {
    return band(sub_word(record + kSubScales, group * 2 + half, v), splat_i32(15));
  }
  KT_INLINE static F32 scale(const uint8_t* record, int group, int half, int v) {
    return mul(d(record, v), to_f32(integer_scale(record, group, half, v)));
  }
  KT_INLINE static F32 minimum(const uint8_t* record, int group, int half, int v) {
    const I32 m = shift_16<-4>(sub_word(record + kSubScales, group * 2 + half, v));
    return mul(minus_dmin(record, v), to_f32(band(m, splat_i32(15))));
  }
  template <int J>
  KT_INLINE static I32 minimum_pair(const uint8_t* record, int v) {
    const I32 word = load_i(record + kSubScales + J / 2 * 64 + v * kVectorBytes);
    return band(shift_16<-4 - 8 * (J % 2)>(word), splat_i32(0x000F000F));
  }

  template <class Rows>
  KT_INLINE static void pack(const Rows& rows, uint8_t* record, int) {
    typename Rows::W w[4];
    rows.load(sizeof(BlockQ2_K) - 16, w);  // d and dmin are the last word
    put_d(rows, record, w[3]);
    rows.load(offsetof(BlockQ2_K, scales), w);
    KT_UNROLL for (int i = 0; i < 4; i++)
      rows.put(record + kSubScales + i * 64, w[i]);
    KT_UNROLL for (int n = 0; n < 2; n++)
      put_groups<2>(rows, offsetof(BlockQ2_K, qs) + n * 32, record + kCodes + n * 4 * kGroupBytes, kGroupBytes);
  }
  KT_INLINE static void unpack_block(const uint8_t* record, int, int row, uint8_t* block) {
    get_d(record, row, block);
    KT_UNROLL for (int i = 0; i < 4; i++)
      std::memcpy(block + offsetof(BlockQ2_K, scales) + i * 4, record + kSubScales + i * 64 + row * 4, 4);
    KT_UNROLL for (int n = 0; n < 2; n++)
      get_groups<2>(record + kCodes + row * 4 + n * 4 * kGroupBytes, kGroupBytes,
                    block + offsetof(BlockQ2_K, qs) + n * 32);
  }

  static void dequantize(const uint8_t* p, float* out) {
    BlockQ2_K b;
    std::memcpy(&b, p, sizeof b);
    const float d = half_to_float(b.d), dmin = half_to_float(b.dmin);
    for (int e = 0; e < 256; e++) {
      const int q = b.qs[e / 128 * 32 + e % 32] >> (e % 128 / 32 * 2) & 3, s = b.scales[e / 16];
      out[e] = d * static_cast<float>(s & 15) * static_cast<float>(q) - dmin * static_cast<float>(s >> 4);
    }
  }
};

// Sub-scale times code as the code, and d the only scale: two codes a 16-bit product, without a carry between them.
// (q - 4) * sc + 124 lies in 0..252 for sc in -32..31. As sums of 16 bits, q * sc + (124 - 4 * sc) * 257 are two of
// them.
struct Q3_K::Folded : Q3_K {
  using Stored = Q3_K;
  static constexpr int kOffset = 124, kMaxCode = 252, kScales = 1;
  template <int S>
  KT_INLINE static I32 code(const uint8_t* record, int group, int v) {
    const I32 sc = twice(load_s8(sub_scales(record, group * 2 + S / 4) + v * kLanes));
    const I32 start = add_i16(splat_i8(124), mul_low_16(sc, splat_i32(-1028 * 0x10000 | (-1028 & 0xFFFF))));
    return add_i16(mul_low_16(Q3_K::code<S>(record, group, v), sc), start);
  }
  KT_INLINE static F32 scale(const uint8_t* record, int, int, int v) { return d(record, v); }
};
// q * sc is at most 45.
struct Q2_K::Folded : Q2_K {
  using Stored = Q2_K;
  static constexpr int kMaxCode = 45, kScales = 1;
  template <int S>
  KT_INLINE static I32 code(const uint8_t* record, int group, int v) {
    return mul_low_16(Q2_K::code<S>(record, group, v), twice(integer_scale(record, group, S / 4, v)));
  }
  KT_INLINE static F32 scale(const uint8_t* record, int, int, int v) { return d(record, v); }
};

}  // namespace ktlinear::tinyblas::KT_TIER
