// Quantizers of IQ4_NL, IQ4_XS, MXFP4, NVFP4.
#pragma once

#include "../decode/codebook.h"
#include "blocks.h"

namespace ktlinear::tinyblas::KT_TIER {

// Sixteen bytes of nibbles from 32 codes.
KT_INLINE void put_nibbles(const Codes<32>& codes, int group, uint8_t* qs) {
  for (int j = 0; j < 4; j++) {
    const uint32_t word = codes.word[j][group] | codes.word[j + 4][group] << 4;
    std::memcpy(qs + j * 4, &word, 4);
  }
}

struct LevelsIQ4 {
  static constexpr float level(int q) { return static_cast<float>(kLevelsIQ4[q] - 128); }
  // The nearest level of v, the upper one of two, and its code.
  KT_INLINE static F32 nearest(F32 v, F32& code) {
    F32 nearest = set1(level(0));
    code = zero();
    KT_UNROLL for (int i = 1; i < 16; i++) {
      const Mask above = v >= 0.5f * (level(i - 1) + level(i));
      nearest = above ? set1(level(i)) : nearest;
      code = above ? set1(static_cast<float>(i)) : code;
    }
    return nearest;
  }
  // Levels are chosen by fifteen inverse scales about the one that brings the largest element to level 0, and by that
  // one's negative; each choice has a least-squares scale, and the smallest error wins.
  KT_NOINLINE static F32 fit(const F32* x, const F32* w) {
    const F32 extreme = extreme_of<32>(x);
    F32 best = zero(), scale = zero();
    for (int i = -8; i <= 7; i++) {
      const F32 inverse = set1(i == -8 ? -level(0) : static_cast<float>(i) + level(0)) / extreme;
      F32 xq = zero(), qq = zero();
      for (int e = 0; e < 32; e++) {
        F32 code;
        const F32 q = nearest(inverse * x[e], code), wq = w[e] * q;
        xq += wq * x[e];
        qq += wq * q;
      }
      const Mask better = (qq > 0.f) & (xq * xq > best * qq);
      scale = better ? xq / qq : scale;
      best = better ? scale * xq : best;
    }
    return abs_of(extreme) > kTinyScale ? scale : zero();
  }
  // Codes for the scales as they are stored.
  KT_NOINLINE static void round(const Groups<32>& g, const float* scales, Codes<32>& codes) {
    for (int b = 0; b < g.kBatches; b++) {
      const F32 scale = load(scales + b * kLanes), inverse = scale != 0.f ? 1.f / scale : zero();
      F32 l[32];
      for (int i = 0; i < 32; i++) nearest(inverse * g.x[b][i], l[i]);
      codes.put(b, l);
    }
  }
  // Weights x^2, or those of the importance.
  KT_NOINLINE static void scales(Groups<32>& g, const Source& s, int block, float* scales) {
    if (s.importance) g.weigh(s, block, 2);
    for (int b = 0; b < g.kBatches; b++) {
      if (!s.importance) g.weigh_by_square(b);
      store(scales + b * kLanes, fit(g.x[b], g.w[b]));
    }
  }
};

template <>
struct Quantizer<Type::IQ4_NL> {
  static void chunk(const Source& s, uint8_t* out) {
    Groups<32> g(s.x);
    float scales[16];
    LevelsIQ4::scales(g, s, 32, scales);
    BlockIQ4_NL blocks[16];
    for (int i = 0; i < 16; i++) {
      blocks[i].d = float_to_half(scales[i]);
      scales[i] = half_to_float(blocks[i].d);
    }
    Codes<32> codes;
    LevelsIQ4::round(g, scales, codes);
    for (int i = 0; i < 16; i++) put_nibbles(codes, i, blocks[i].qs);
    std::memcpy(out, blocks, sizeof blocks);
  }
};

// d = -(scale of largest magnitude) / 32; the sub-scales are rounded to -32..31.
template <>
struct Quantizer<Type::IQ4_XS> {
  static void chunk(const Source& s, uint8_t* out) {
    Groups<32> g(s.x);
    float scales[16];
    LevelsIQ4::scales(g, s, 256, scales);
    BlockIQ4_XS blocks[2] = {};
    for (int i = 0; i < 2; i++) {
      float (&each)[8] = *reinterpret_cast<float (*)[8]>(scales + i * 8);
      blocks[i].d = float_to_half(extreme_of<8>(each) / -32.f);
      const float d = half_to_float(blocks[i].d), inverse = d != 0 ? 1.f / d : 0.f;
      for (int j = 0; j < 8; j++) {
        const float rounded = round_clamped(inverse * each[j], -32, 31);
        const int code = static_cast<int>(rounded) + 32;
        blocks[i].scales_h = static_cast<uint16_t>(blocks[i].scales_h | code >> 4 << (j * 2));
        blocks[i].scales_l[j / 2] = static_cast<uint8_t>(blocks[i].scales_l[j / 2] | (code & 15) << (j % 2 * 4));
        each[j] = d * rounded;
      }
    }
    Codes<32> codes;
    LevelsIQ4::round(g, scales, codes);
    for (int i = 0; i < 16; i++) put_nibbles(codes, i, blocks[i / 8].qs + i % 8 * 16);
    std::memcpy(out, blocks, sizeof blocks);
  }
};

struct LevelsE2M1 {
  static constexpr float level(int q) { return static_cast<float>(kLevelsE2M1[q] - 12); }
  // The level nearest to x / scale, x >= 0, times scale, and its code; the lower one of two.
  KT_INLINE static F32 nearest(F32 x, F32 scale, F32& code) {
    F32 nearest = zero();
    code = zero();
    KT_UNROLL for (int i = 1; i < 8; i++) {
      const Mask above = x > scale * (0.5f * (level(i - 1) + level(i)));
      nearest = above ? set1(level(i)) : nearest;
      code = above ? set1(static_cast<float>(i)) : code;
    }
    return nearest * scale;
  }
  // For each group, of the scales table[code[g]] .. table[code[g] + more] that of the least squared error.
  template <int N>
  KT_NOINLINE static void choose(Groups<N>& g, const float* importance, const float* table, int more, int last,
                                 uint8_t* code) {
    for (int b = 0; b < g.kBatches; b++, code += kLanes) {
      g.load_importance(importance, b);
      uint8_t best[kLanes];
      float least[kLanes], scale[kLanes], error[kLanes];
      for (int t = 0; t <= more; t++) {
        for (int i = 0; i < kLanes; i++) scale[i] = table[min_of(code[i] + t, last)];
        F32 sum = zero(), unused;
        for (int i = 0; i < N; i++) {
          const F32 x = abs_of(g.x[b][i]), difference = nearest(x, load(scale), unused) - x;
          sum += g.w[b][i] * difference * difference;
        }
        store(error, sum);
        for (int i = 0; i < kLanes; i++)
          if (t == 0 || error[i] < least[i]) {
            least[i] = error[i];
            best[i] = static_cast<uint8_t>(min_of(code[i] + t, last));
          }
      }
      std::memcpy(code, best, kLanes);
    }
  }
  // Codes for the scales table[code[g]].
  template <int N>
  KT_NOINLINE static void round(const Groups<N>& g, const float* table, const uint8_t* code, Codes<N>& codes) {
    for (int b = 0; b < g.kBatches; b++, code += kLanes) {
      float scale[kLanes];
      for (int i = 0; i < kLanes; i++) scale[i] = table[code[i]];
      F32 l[N];
      for (int i = 0; i < N; i++) {
        nearest(abs_of(g.x[b][i]), load(scale), l[i]);
        l[i] = ((g.x[b][i] < 0.f) & (l[i] > 0.f)) ? l[i] + 8.f : l[i];
        l[i] = load(scale) > 0.f ? l[i] : zero();
      }
      codes.put(b, l);
    }
  }
};

// e = floor(log2 amax) - 2 + 127, in fp32 (an amax just below a power of two rounds up to it, as in the reference); at
// least 0, where the reference wraps around. With an importance, the best of e - 1, e, e + 1.
template <>
struct Quantizer<Type::MXFP4> {
  static void chunk(const Source& s, uint8_t* out) {
    Groups<32> g(s.x);
    uint8_t e[16];
    for (int i = 0; i < 16; i++) {
      const float amax = abs_of(extreme_of<32>(s.x + i * 32));
      const int code = amax > 0 ? static_cast<int>(__builtin_floorf(__builtin_log2f(min_of(amax, 0x1p127f)))) + 125 : 0;
      e[i] = static_cast<uint8_t>(max_of(code - (s.importance != nullptr), 0));
    }
    if (s.importance) LevelsE2M1::choose(g, s.importance, kE8M0.value, 2, 254, e);
    Codes<32> codes;
    LevelsE2M1::round(g, kE8M0.value, e, codes);
    for (int i = 0; i < 16; i++, out += sizeof(BlockMXFP4)) {
      out[0] = e[i];
      put_nibbles(codes, i, out + 1);
    }
  }
};

// Two scale codes below the first that brings the largest element within the levels, that one, and six above, up to
// where it meets the second largest level: the least squared error wins.
template <>
struct Quantizer<Type::NVFP4> {
  static constexpr int kLastCode = 0x7E;

  // The smallest code whose scale is at least v, or the last.
  static int code_of(float v) {
    int low = 0, high = kLastCode;
    while (low < high) {
      const int middle = (low + high) / 2;
      kE4M3.value[middle] < v ? low = middle + 1 : high = middle;
    }
    return low;
  }
  static void chunk(const Source& s, uint8_t* out) {
    Groups<16> g(s.x);
    uint8_t d[32];
    for (int i = 0; i < 32; i++) {
      const float amax = abs_of(extreme_of<16>(s.x + i * 16));
      d[i] = static_cast<uint8_t>(max_of(code_of(amax / LevelsE2M1::level(7)) - 2, 0));
    }
    LevelsE2M1::choose(g, s.importance, kE4M3.value, 8, kLastCode, d);
    Codes<16> codes;
    LevelsE2M1::round(g, kE4M3.value, d, codes);
    for (int i = 0; i < 8; i++, out += sizeof(BlockNVFP4)) {
      std::memcpy(out, d + i * 4, 4);
      for (int j = 0; j < 4; j++)
        for (int w = 0; w < 2; w++) {
          const uint32_t word = codes.word[w][i * 4 + j] | codes.word[w + 2][i * 4 + j] << 4;
          std::memcpy(out + 4 + j * 8 + w * 4, &word, 4);
        }
    }
  }
};

}  // namespace ktlinear::tinyblas::KT_TIER
