// Quantizers of types whose scales stand alone: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, TQ1_0, TQ2_0. All but the weighted search
// follow the `gguf` package bit for bit. A quantizer turns kChunk elements into blocks.
#pragma once

#include "../decode/nibbles.h"
#include "../decode/ternary.h"
#include "search.h"

namespace ktlinear::tinyblas::KT_TIER {

template <Type T>
struct Quantizer;

template <class Block>
struct NibbleQuantizer {
  using D = Nibbles<Block>;

  // Without a minimum: d = x / -(levels / 2) for the x of largest magnitude, q = trunc(x / d + levels / 2 + 0.5), at
  // most levels - 1. With one: d = (max - min) / (levels - 1), m = min, q = trunc((x - m) / d + 0.5). Both with the
  // fp32 inverse of the fp32 d.
  static void block(const float* x, uint8_t* p) {
    Block b{};
    float base = 0, d;
    if constexpr (D::kHasMinimum) {
      float lo = x[0], hi = x[0];
      for (int i = 1; i < 32; i++) {
        lo = x[i] < lo ? x[i] : lo;
        hi = x[i] > hi ? x[i] : hi;
      }
      d = (hi - lo) / static_cast<float>(D::kLevels - 1);
      base = lo;
      b.m = float_to_half(lo);
    } else {
      d = extreme_of<32>(x) / static_cast<float>(-D::kLevels / 2);
    }
    const float inverse = inverse_of_scale(d);
    b.d = float_to_half(d);
    uint32_t high = 0;
    for (int j = 0; j < 32; j++) {
      const float v = (x[j] - base) * inverse + static_cast<float>(D::kOffset) + 0.5f;
      const int q = static_cast<int>(v < D::kMaxCode ? v : D::kMaxCode);  // v >= 0 but for NaN, which compares false
      b.qs[j % 16] = static_cast<uint8_t>(b.qs[j % 16] | (q & 15) << (j / 16 * 4));
      high |= static_cast<uint32_t>(q >> 4) << j;
    }
    if constexpr (D::kHasBit) std::memcpy(b.qh, &high, 4);
    std::memcpy(p, &b, sizeof b);
  }
  static void weighted(const Source& s, uint8_t* out) {
    Groups<32> g(s.x);
    float square[16];
    for (float& v : square) v = s.row_square;
    g.weigh(s.importance, square);
    float scale[16], minimum[16] = {};
    for (int b = 0; b < g.kBatches; b++) {
      if constexpr (D::kHasMinimum) {
        const Fit fit = fit_minimum<32, D::kMaxCode, false>(g.x[b], g.w[b], kTrialsWithImportance);
        store(scale + b * kLanes, fit.scale);
        store(minimum + b * kLanes, fit.minimum);
      } else {
        store(scale + b * kLanes, fit_signed<32, D::kOffset>(g.x[b], g.w[b]));
      }
    }
    uint16_t d[16], m[16];
    for (int i = 0; i < 16; i++) {
      d[i] = float_to_half(scale[i]);
      m[i] = float_to_half(-minimum[i]);
      scale[i] = half_to_float(d[i]);
      minimum[i] = -half_to_float(m[i]);
    }
    Codes<32> codes;
    round_codes<32, D::kOffset, D::kMaxCode>(g, scale, minimum, codes);
    for (int i = 0; i < 16; i++) {
      Block b;
      uint32_t qs[4], high = 0;
      for (int j = 0; j < 8; j++) {
        const uint32_t w = codes.word[j][i], low = w & 0x0F0F0F0Fu;
        qs[j % 4] = j < 4 ? low : qs[j % 4] | low << 4;
        const uint32_t bits = w >> 4 & 0x01010101u;
        high |= ((bits | bits >> 7 | bits >> 14 | bits >> 21) & 15) << (j * 4);
      }
      b.d = d[i];
      if constexpr (D::kHasMinimum) b.m = m[i];
      if constexpr (D::kHasBit) std::memcpy(b.qh, &high, 4);
      std::memcpy(b.qs, qs, 16);
      std::memcpy(out + i * static_cast<int>(sizeof b), &b, sizeof b);
    }
  }
  static void chunk(const Source& s, uint8_t* out) {
    if (s.importance) return weighted(s, out);
    for (int i = 0; i < 16; i++) block(s.x + i * 32, out + i * static_cast<int>(sizeof(Block)));
  }
};
template <>
struct Quantizer<Type::Q4_0> : NibbleQuantizer<BlockQ4_0> {};
template <>
struct Quantizer<Type::Q4_1> : NibbleQuantizer<BlockQ4_1> {};
template <>
struct Quantizer<Type::Q5_0> : NibbleQuantizer<BlockQ5_0> {};
template <>
struct Quantizer<Type::Q5_1> : NibbleQuantizer<BlockQ5_1> {};

// d = amax / 127, q = x / d rounded half away from zero, with the fp32 inverse of the fp32 d. Eight bits leave an
// importance nothing to choose.
template <>
struct Quantizer<Type::Q8_0> {
  static void block(const float* x, uint8_t* p) {
    BlockQ8_0 b;
    float amax = 0;
    for (int i = 0; i < 32; i++) amax = max_of(abs_of(x[i]), amax);
    const float d = amax / 127.f, inverse = inverse_of_scale(d);
    b.d = float_to_half(d);
    for (int i = 0; i < 32; i++) {
      const float v = x[i] * inverse, a = abs_of(v);
      const int whole = static_cast<int>(a);
      const int q = whole + static_cast<int>(2.f * (a - static_cast<float>(whole)));  // a < 128
      b.qs[i] = static_cast<int8_t>(v < 0 ? -q : q);
    }
    std::memcpy(p, &b, sizeof b);
  }
  static void chunk(const Source& s, uint8_t* out) {
    for (int i = 0; i < 16; i++) block(s.x + i * 32, out + i * static_cast<int>(sizeof(BlockQ8_0)));
  }
};

// d = amax; codes are x / d rounded half away from zero, plus 1, with the fp32 inverse of the fp32 d: exact for weights
// trained to be ternary, which is what these types are for, importance or not.
KT_INLINE uint16_t ternary_codes(const float* x, uint8_t* codes) {
  float d = 0;
  for (int i = 0; i < 256; i++) d = max_of(abs_of(x[i]), d);
  const float inverse = inverse_of_scale(d);
  for (int i = 0; i < 256; i++) {
    const float v = x[i] * inverse;
    codes[i] = static_cast<uint8_t>(1 + (v >= 0.5f) - (v <= -0.5f));
  }
  return float_to_half(d);
}
template <>
struct Quantizer<Type::TQ2_0> {
  static void chunk(const Source& s, uint8_t* out) {
    for (int i = 0; i < kChunk / 256; i++, out += sizeof(BlockTQ2_0)) {
      uint8_t codes[256];
      const uint16_t d = ternary_codes(s.x + i * 256, codes);
      for (int b = 0; b < 64; b++) {
        const uint8_t* c = codes + b / 32 * 128 + b % 32;
        out[b] = static_cast<uint8_t>(c[0] | c[32] << 2 | c[64] << 4 | c[96] << 6);
      }
      std::memcpy(out + 64, &d, 2);
    }
  }
};
template <>
struct Quantizer<Type::TQ1_0> {
  static void chunk(const Source& s, uint8_t* out) {
    for (int i = 0; i < kChunk / 256; i++, out += sizeof(BlockTQ1_0)) {
      uint8_t codes[256], sums[52] = {};
      const uint16_t d = ternary_codes(s.x + i * 256, codes);
      for (int e = 0; e < 256; e++) {
        const TQ1_0::Digit at = TQ1_0::place(e / 32, e % 32 / 4);
        uint8_t& sum = sums[at.word * 4 + e % 4];
        sum = static_cast<uint8_t>(sum + codes[e] * kPowersOf3[4 - at.power]);
      }
      for (int b = 0; b < 52; b++) out[b] = static_cast<uint8_t>((sums[b] * 256 + 242) / 243);
      std::memcpy(out + 52, &d, 2);
    }
  }
};

}  // namespace ktlinear::tinyblas::KT_TIER
