// What the quantizers share. A vector holds one element each of kLanes groups, a group being the elements that have a
// scale in common: so a search costs one pass for many groups, and its sums run over a group's elements in order, which
// gives every tier the same bits. (Nothing is fused.)
//
// Here F32 and float are used alike, by the operators of C++ (GNU vector extensions): a comparison gives a mask, which
// ?: and & take.
#pragma once

#include <type_traits>

#include "../scalar.h"

namespace ktlinear::tinyblas::KT_TIER {

inline constexpr int kChunk = 512;  // elements quantized at once: whole vectors of groups of 16 or 32, on every tier
static_assert(kChunk / 32 % kLanes == 0);

using Mask = decltype(F32{} < F32{});
using Int = Mask;  // 32-bit lanes; I32 is not arithmetic in every tier

template <class T>
KT_INLINE T splat(float v) {
  if constexpr (std::is_same_v<T, float>)
    return v;
  else
    return set1(v);
}
KT_INLINE float abs_of(float v) { return __builtin_fabsf(v); }
KT_INLINE F32 abs_of(F32 v) { return bits_as<F32>(bits_as<Int>(v) & 0x7FFFFFFF); }
template <class T>
KT_INLINE T max_of(T a, T b) {
  return a > b ? a : b;
}

// x rounded to nearest even and clamped to [low, high]; NaN gives low.
template <class T>
KT_INLINE T round_clamped(T x, float low, float high) {
  return (min_of(max_of(x, splat<T>(low)), splat<T>(high)) + 12582912.f) - 12582912.f;
}
// Whole numbers of less than 2^22 as integers: in a sum with 1.5 * 2^23 they are the mantissa's low bits.
KT_INLINE Int to_int(F32 whole) { return bits_as<Int>(whole + 12582912.f) - 0x4B400000; }

// The element of largest magnitude, the first of several.
template <int N, class T>
KT_INLINE T extreme_of(const T* x) {
  T e = x[0];
  for (int i = 1; i < N; i++) e = abs_of(x[i]) > abs_of(e) ? x[i] : e;
  return e;
}

// The mean of the squares, in sixteen sums: as many as the widest vector has lanes, so that all tiers agree.
inline float mean_square(const float* x, int64_t n) {
  float sums[16] = {};
  for (int64_t i = 0; i < n; i += 16)
    for (int j = 0; j < 16; j++) sums[j] += x[i + j] * x[i + j];
  float sum = 0;
  for (float s : sums) sum += s;
  return sum / static_cast<float>(n);
}

// Element i of groups of N consecutive elements each, kLanes of them.
template <int N>
KT_INLINE void load_groups(const float* p, F32* elements) {
  for (int first = 0; first < N; first += kLanes) {
    F32 tile[kLanes];
    KT_UNROLL for (int g = 0; g < kLanes; g++)
      tile[g] = load(p + g * N + first);
    transpose(tile);
    KT_UNROLL for (int i = 0; i < kLanes; i++)
      elements[first + i] = tile[i];
  }
}

// What a quantizer is given: kChunk elements of a row, the importance of each (or nullptr), and the mean of the row's
// squares, for which an importance asks in blocks of 32.
struct Source {
  const float* x;
  const float* importance;
  float row_square;
};

template <int N>
struct Groups {
  static constexpr int kCount = kChunk / N, kBatches = kCount / kLanes;
  F32 x[kBatches][N], w[kBatches][N];  // elements and the weights of their squared errors

  KT_NOINLINE explicit Groups(const float* p) {
    for (int b = 0; b < kBatches; b++) load_groups<N>(p + b * kLanes * N, x[b]);
  }
  // w = importance; a group without any, or none given, counts as if all its elements had the same.
  KT_NOINLINE void load_importance(const float* importance, int b) {
    if (importance) load_groups<N>(importance + b * kLanes * N, w[b]);
    const F32 sum = importance ? total_weight(b) : zero();
    for (int i = 0; i < N; i++) w[b][i] = sum > 0.f ? w[b][i] : set1(1.f);
  }
  // Weights importance * sqrt(square + x^2), as ggml's; `square` for each group.
  KT_NOINLINE void weigh(const float* importance, const float* square) {
    for (int b = 0; b < kBatches; b++) {
      load_importance(importance, b);
      const F32 s = load(square + b * kLanes);
      for (int i = 0; i < N; i++) w[b][i] *= sqrt_of(s + x[b][i] * x[b][i]);
    }
  }
  // The same with `factor` times the mean square of the `block` elements around a group.
  KT_NOINLINE void weigh(const Source& s, int block, float factor) {
    float square[kCount];
    for (int g = 0; g < kCount; g++)
      square[g] = g * N % block == 0 ? factor * mean_square(s.x + g * N, block) : square[g - 1];
    weigh(s.importance, square);
  }
  KT_INLINE void weigh_by_square(int b) {
    for (int i = 0; i < N; i++) w[b][i] = x[b][i] * x[b][i];
  }
  KT_INLINE F32 total_weight(int b) const {
    F32 sum = zero();
    for (int i = 0; i < N; i++) sum += w[b][i];
    return sum;
  }
};

// Codes of a chunk's groups, four consecutive elements to a word.
template <int N>
struct Codes {
  static constexpr int kCount = kChunk / N;
  uint32_t word[N / 4][kCount];

  // Codes of batch b from l, whole numbers (a byte each, two's complement).
  KT_INLINE void put(int b, const F32* l) {
    for (int i = 0; i < N / 4; i++) {
      Int w = to_int(l[i * 4]) & 255;
      KT_UNROLL for (int j = 1; j < 4; j++)
        w |= (to_int(l[i * 4 + j]) & 255) << (8 * j);
      std::memcpy(&word[i][b * kLanes], &w, sizeof w);
    }
  }
};

}  // namespace ktlinear::tinyblas::KT_TIER
