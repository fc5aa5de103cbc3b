// Quantizers of Q2_K, Q3_K, Q4_K, Q5_K, Q6_K: the scales of the groups are searched, rounded against one another within
// a super-block, and the elements rounded to what is stored. With an importance the second step is weighted, too.
#pragma once

#include "../decode/k_quants.h"
#include "blocks.h"

namespace ktlinear::tinyblas::KT_TIER {

// The four codes of a word as fields of BITS bits at `shift`.
KT_INLINE void add_fields(uint8_t* bytes, uint32_t word, uint32_t mask, int shift) {
  const uint32_t old = load_as<uint32_t>(bytes), sum = old | (word & mask) << shift;
  std::memcpy(bytes, &sum, 4);
}

// Scales and minima of a chunk's groups, those of each super-block rounded to `LAST`.
template <int N, int LAST>
struct SubScales {
  static constexpr int kCount = kChunk / N, kEach = 256 / N;
  float scale[kCount], minimum[kCount], weight[kCount];
  uint8_t sc[kCount], m[kCount];
  uint16_t d[2], dmin[2];

  KT_INLINE void put(int b, const Fit& fit, F32 total_weight) {
    store(scale + b * kLanes, fit.scale);
    store(minimum + b * kLanes, fit.minimum);
    store(weight + b * kLanes, total_weight);
  }
  KT_INLINE void round(bool weighted) {
    for (int i = 0; i < 2; i++) {
      d[i] = round_one(scale + i * kEach, i, weighted, sc);
      dmin[i] = round_one(minimum + i * kEach, i, weighted, m);
    }
  }

 private:
  KT_INLINE uint16_t round_one(float* values, int i, bool weighted, uint8_t* codes) {
    float (&v)[kEach] = *reinterpret_cast<float (*)[kEach]>(values);
    const float (&w)[kEach] = *reinterpret_cast<const float (*)[kEach]>(weight + i * kEach);
    codes += i * kEach;
    const uint16_t half = weighted ? fit_unsigned<LAST>(v, w, codes) : round_unsigned<LAST>(v, codes);
    for (int g = 0; g < kEach; g++) v[g] = half_to_float(half) * codes[g];
    return half;
  }
};

template <class Block>
struct SixBitQuantizer {
  using D = SixBitMinimum<Block>;

  static void chunk(const Source& s, uint8_t* out) {
    Groups<32> g(s.x);
    if (s.importance) g.weigh(s, 256, 2);
    SubScales<32, 63> sub;
    for (int b = 0; b < g.kBatches; b++) {
      if (!s.importance) {
        F32 square = zero();
        for (int i = 0; i < 32; i++) square += g.x[b][i] * g.x[b][i];
        const F32 rms = sqrt_of(square / 32.f);
        for (int i = 0; i < 32; i++) g.w[b][i] = rms + abs_of(g.x[b][i]);
      }
      const Trials plain = D::kHasBit ? Trials{-0.5f, 0.1f, 15} : Trials{-1.f, 0.1f, 20};
      const Fit fit = fit_minimum<32, D::kMaxCode, false>(g.x[b], g.w[b], s.importance ? kTrialsWithImportance : plain);
      sub.put(b, fit, g.total_weight(b));
    }
    sub.round(s.importance);
    Codes<32> codes;
    round_codes<32, 0, D::kMaxCode>(g, sub.scale, sub.minimum, codes);
    for (int i = 0; i < 2; i++, out += sizeof(Block)) {
      Block b{};
      b.d = sub.d[i];
      b.dmin = sub.dmin[i];
      typename D::SubScales packed;
      std::memcpy(packed.sc, sub.sc + i * 8, 8);
      std::memcpy(packed.m, sub.m + i * 8, 8);
      D::pack_scales(packed, b.scales);
      for (int j = 0; j < 8; j++)
        for (int w = 0; w < 8; w++) {
          const uint32_t word = codes.word[w][i * 8 + j];
          add_fields(b.qs + j / 2 * 32 + w * 4, word, 0x0F0F0F0F, j % 2 * 4);
          if constexpr (D::kHasBit) add_fields(b.qh + w * 4, word >> 4, 0x01010101, j);
        }
      std::memcpy(out, &b, sizeof b);
    }
  }
};
template <>
struct Quantizer<Type::Q4_K> : SixBitQuantizer<BlockQ4_K> {};
template <>
struct Quantizer<Type::Q5_K> : SixBitQuantizer<BlockQ5_K> {};

// Without an importance: absolute errors, which weigh |x|.
template <>
struct Quantizer<Type::Q2_K> {
  static void chunk(const Source& s, uint8_t* out) {
    Groups<16> g(s.x);
    if (s.importance) g.weigh(s, 256, 1);
    SubScales<16, 15> sub;
    for (int b = 0; b < g.kBatches; b++) {
      if (s.importance) {
        sub.put(b, fit_minimum<16, 3, false>(g.x[b], g.w[b], kTrialsWithImportance), g.total_weight(b));
      } else {
        for (int i = 0; i < 16; i++) g.w[b][i] = abs_of(g.x[b][i]);
        sub.put(b, fit_minimum<16, 3, true>(g.x[b], g.w[b], {-0.5f, 0.1f, 15}), zero());
      }
    }
    sub.round(s.importance);
    Codes<16> codes;
    round_codes<16, 0, 3>(g, sub.scale, sub.minimum, codes);
    for (int i = 0; i < 2; i++, out += sizeof(BlockQ2_K)) {
      BlockQ2_K b{};
      b.d = sub.d[i];
      b.dmin = sub.dmin[i];
      for (int j = 0; j < 16; j++) {
        b.scales[j] = static_cast<uint8_t>(sub.sc[i * 16 + j] | sub.m[i * 16 + j] << 4);
        for (int w = 0; w < 4; w++)
          add_fields(b.qs + j / 8 * 32 + j % 2 * 16 + w * 4, codes.word[w][i * 16 + j], 0x03030303, j % 8 / 2 * 2);
      }
      std::memcpy(out, &b, sizeof b);
    }
  }
};

template <>
struct Quantizer<Type::Q3_K> {
  static void chunk(const Source& s, uint8_t* out) {
    Groups<16> g(s.x);
    if (s.importance) g.weigh(s, 256, 2);
    float scales[32], weights[32];
    for (int b = 0; b < g.kBatches; b++) {
      if (!s.importance) g.weigh_by_square(b);
      store(scales + b * kLanes,
            s.importance ? fit_signed<16, 4>(g.x[b], g.w[b]) : descend_signed<16, 4>(g.x[b], g.w[b]));
      store(weights + b * kLanes, g.total_weight(b));
    }
    uint16_t d[2];
    int8_t sc[32];
    for (int i = 0; i < 2; i++) {
      float (&each)[16] = *reinterpret_cast<float (*)[16]>(scales + i * 16);
      if (s.importance) {
        d[i] = float_to_half(fit_signed<16, 32>(each, weights + i * 16));
        const float unit = half_to_float(d[i]), inverse = unit != 0 ? 1.f / unit : 0.f;
        for (int j = 0; j < 16; j++) sc[i * 16 + j] = static_cast<int8_t>(round_clamped(each[j] * inverse, -32, 31));
      } else {
        d[i] = round_signed<32>(each, sc + i * 16);
      }
      for (int j = 0; j < 16; j++) each[j] = half_to_float(d[i]) * sc[i * 16 + j];
    }
    Codes<16> codes;
    round_codes<16, 4, 7>(g, scales, nullptr, codes);
    for (int i = 0; i < 2; i++, out += sizeof(BlockQ3_K)) {
      BlockQ3_K b{};
      b.d = d[i];
      for (int j = 0; j < 16; j++) {
        Q3_K::put_scale(b.scales, j, sc[i * 16 + j]);
        for (int w = 0; w < 4; w++) {
          const uint32_t word = codes.word[w][i * 16 + j];
          const int l = j % 2 * 16 + w * 4;
          add_fields(b.qs + j / 8 * 32 + l, word, 0x03030303, j % 8 / 2 * 2);
          add_fields(b.hmask + l, word >> 2, 0x01010101, j / 2);
        }
      }
      std::memcpy(out, &b, sizeof b);
    }
  }
};

// An importance is the weight itself here, and only in the search, as in ggml.
template <>
struct Quantizer<Type::Q6_K> {
  static void chunk(const Source& s, uint8_t* out) {
    Groups<16> g(s.x);
    float scales[32];
    for (int b = 0; b < g.kBatches; b++) {
      if (s.importance) {
        g.load_importance(s.importance, b);
      } else {
        g.weigh_by_square(b);
      }
      store(scales + b * kLanes, fit_signed<16, 32>(g.x[b], g.w[b]));
    }
    BlockQ6_K blocks[2] = {};
    for (int i = 0; i < 2; i++) {
      float (&each)[16] = *reinterpret_cast<float (*)[16]>(scales + i * 16);
      blocks[i].d = round_signed<128>(each, blocks[i].scales);
      for (int j = 0; j < 16; j++) each[j] = half_to_float(blocks[i].d) * blocks[i].scales[j];
    }
    Codes<16> codes;
    round_codes<16, 32, 63>(g, scales, nullptr, codes);
    for (int i = 0; i < 2; i++)
      for (int j = 0; j < 16; j++)
        for (int w = 0; w < 4; w++) {
          const uint32_t word = codes.word[w][i * 16 + j];
          const int n = j / 8, quarter = j % 8 / 2, l = j % 2 * 16 + w * 4;
          add_fields(blocks[i].ql + n * 64 + quarter % 2 * 32 + l, word, 0x0F0F0F0F, quarter / 2 * 4);
          add_fields(blocks[i].qh + n * 32 + l, word >> 4, 0x03030303, quarter * 2);
        }
    std::memcpy(out, blocks, sizeof blocks);
  }
};

}  // namespace ktlinear::tinyblas::KT_TIER
