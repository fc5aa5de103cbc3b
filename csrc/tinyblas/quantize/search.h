// How scales are chosen: least squares over a few trials, as the reference (ggml) does. x holds the N elements of a
// group and w the weights of their squared errors; T is F32 for many groups at once, or float.
#pragma once

#include "lanes.h"

namespace ktlinear::tinyblas::KT_TIER {

inline constexpr float kTinyScale = 1e-15f;  // no smaller scale is inverted: fp16 holds none below 6e-8

// x ~ scale * l, l in [-LEVELS, LEVELS): the trials round x by inverse scales -(LEVELS + 0.1 i) / extreme, i = -9..9;
// the scale is least squares for the codes of the best.
template <int N, int LEVELS, class T>
KT_NOINLINE T fit_signed(const T* x, const T* w) {
  const T extreme = extreme_of<N>(x);
  T scale{}, best{};
  for (int trial = 0; trial < 19; trial++) {  // i = 0 first, which wins a draw
    const int i = trial == 0 ? 0 : trial <= 9 ? trial - 10 : trial - 9;
    const T inverse = splat<T>(-(LEVELS + 0.1f * static_cast<float>(i))) / extreme;
    T xl{}, ll{};
    for (int e = 0; e < N; e++) {
      const T l = round_clamped(inverse * x[e], -LEVELS, LEVELS - 1);
      xl += w[e] * x[e] * l;
      ll += w[e] * l * l;
    }
    const auto better = (ll > 0.f) & (xl * xl > best * ll);
    scale = better ? xl / ll : scale;
    best = better ? scale * xl : best;
  }
  return abs_of(extreme) < kTinyScale ? T{} : scale;
}

// The same by coordinate descent: five passes that move one code at a time to where it lessens the error.
template <int N, int LEVELS, class T>
KT_NOINLINE T descend_signed(const T* x, const T* w) {
  const T extreme = extreme_of<N>(x), inverse = splat<T>(-LEVELS) / extreme;
  T l[N], xl{}, ll{};
  for (int i = 0; i < N; i++) {
    l[i] = round_clamped(inverse * x[i], -LEVELS, LEVELS - 1);
    xl += w[i] * x[i] * l[i];
    ll += w[i] * l[i] * l[i];
  }
  for (int pass = 0; pass < 5; pass++) {
    for (int i = 0; i < N; i++) {
      const T wx = w[i] * x[i], other_xl = xl - wx * l[i], other_ll = ll - w[i] * l[i] * l[i];
      const T moved = round_clamped(x[i] * other_ll / other_xl, -LEVELS, LEVELS - 1);
      const T new_xl = other_xl + wx * moved, new_ll = other_ll + w[i] * moved * moved;
      const auto better =
          (other_xl > 0.f) & (moved != l[i]) & (new_ll > 0.f) & (new_xl * new_xl * ll > xl * xl * new_ll);
      l[i] = better ? moved : l[i];
      xl = better ? new_xl : xl;
      ll = better ? new_ll : ll;
    }
  }
  return ((abs_of(extreme) < kTinyScale) | !(ll > 0.f)) ? T{} : xl / ll;
}

struct Fit {
  F32 scale, minimum;  // x ~ scale * l - minimum
};
// Inverse scales (first + delta * i + LAST) / (max - min), i = 0..steps.
struct Trials {
  float first, delta;
  int steps;
};
inline constexpr Trials kTrialsWithImportance{-0.9f, 0.05f, 36};

// x ~ scale * l - minimum, minimum >= 0, l in [0, LAST]: the trials round x - min and solve the weighted 2 x 2 least
// squares for scale and minimum. The best has the least weighted sum of squared, or of absolute, errors; its minimum is
// the one from which later trials start.
template <int N, int LAST, bool ABSOLUTE>
KT_NOINLINE Fit fit_minimum(const F32* x, const F32* w, Trials trials) {
  constexpr float last = LAST;
  F32 low = x[0], high = x[0], sum_w = w[0], sum_x = w[0] * x[0];
  for (int i = 1; i < N; i++) {
    low = min_of(low, x[i]);
    high = max_of(high, x[i]);
    sum_w += w[i];
    sum_x += w[i] * x[i];
  }
  low = min_of(low, zero());
  const Mask flat = high - low < kTinyScale;
  F32 l[N], scale = (high - low) / last, base = low, best = zero();
  auto round = [&](F32 inverse) {
    for (int i = 0; i < N; i++) l[i] = round_clamped(inverse * (x[i] - low), 0, LAST);
  };
  auto error = [&](F32 s, F32 b) {
    F32 sum = zero();
    for (int i = 0; i < N; i++) {
      const F32 e = s * l[i] + b - x[i];
      sum += w[i] * (ABSOLUTE ? abs_of(e) : e * e);
    }
    return sum;
  };
  round(last / (high - low));
  best = error(scale, base);
  for (int step = 0; step <= trials.steps; step++) {
    round((trials.first + trials.delta * static_cast<float>(step) + last) / (high - low));
    F32 sum_l = zero(), sum_ll = zero(), sum_xl = zero();
    for (int i = 0; i < N; i++) {
      const F32 wl = w[i] * l[i];
      sum_l += wl;
      sum_ll += wl * l[i];
      sum_xl += wl * x[i];
    }
    const F32 determinant = sum_w * sum_ll - sum_l * sum_l;
    F32 this_scale = (sum_w * sum_xl - sum_x * sum_l) / determinant;
    F32 this_base = (sum_ll * sum_x - sum_l * sum_xl) / determinant;
    const Mask positive = this_base > 0.f;
    this_scale = positive ? sum_xl / sum_ll : this_scale;
    this_base = positive ? zero() : this_base;
    const F32 e = error(this_scale, this_base);
    const Mask better = (determinant > 0.f) & (e < best);
    best = better ? e : best;
    scale = better ? this_scale : scale;
    base = low = better ? this_base : base;
  }
  return {flat ? zero() : scale, -base};
}

// Second level: N scales of a super-block, rounded to codes; the result is the fp16 unit.
// Signed: d = extreme / -SPAN, codes in [-SPAN, SPAN). Unsigned: d = max / LAST, codes in [0, LAST].
template <int SPAN, int N>
inline uint16_t round_signed(const float (&s)[N], int8_t* codes) {
  const float extreme = extreme_of<N>(s);
  const bool none = abs_of(extreme) < kTinyScale;
  const float inverse = none ? 0.f : -SPAN / extreme;
  for (int i = 0; i < N; i++) codes[i] = static_cast<int8_t>(round_clamped(inverse * s[i], -SPAN, SPAN - 1));
  return float_to_half(none ? 0.f : 1.f / inverse);
}
template <int LAST, int N>
inline uint16_t round_unsigned(const float (&s)[N], uint8_t* codes) {
  float largest = 0;
  for (int i = 0; i < N; i++) largest = max_of(largest, s[i]);
  const float inverse = largest < kTinyScale ? 0.f : LAST / largest;
  for (int i = 0; i < N; i++) codes[i] = static_cast<uint8_t>(round_clamped(inverse * s[i], 0, LAST));
  return float_to_half(largest / LAST);
}
// Unsigned, weighted: the best of inverses (LAST + 0.1 i) / max, i = -4..4, then five passes of coordinate descent.
template <int LAST, int N>
KT_NOINLINE uint16_t fit_unsigned(const float (&s)[N], const float (&w)[N], uint8_t* codes) {
  float largest = 0;
  for (int i = 0; i < N; i++) largest = max_of(largest, s[i]);
  std::memset(codes, 0, N);
  if (largest < kTinyScale) return 0;
  float l[N], best = 0, best_inverse = 0;
  auto round = [&](float inverse) {
    for (int i = 0; i < N; i++) l[i] = round_clamped(inverse * s[i], 0, LAST);
  };
  for (int trial = 0; trial < 9; trial++) {  // i = 0 first, which wins a draw
    const int i = trial == 0 ? 0 : trial <= 4 ? trial - 5 : trial - 4;
    const float inverse = (LAST + 0.1f * static_cast<float>(i)) / largest;
    round(inverse);
    float error = 0;
    for (int e = 0; e < N; e++) {
      const float difference = s[e] - l[e] / inverse;
      error += w[e] * difference * difference;
    }
    if (trial == 0 || error < best) best = error, best_inverse = inverse;
  }
  round(best_inverse);
  float xl = 0, ll = 0;
  for (int i = 0; i < N; i++) {
    xl += w[i] * s[i] * l[i];
    ll += w[i] * l[i] * l[i];
  }
  for (int pass = 0; pass < 5; pass++)
    for (int i = 0; i < N; i++) {
      float other_xl = xl - w[i] * s[i] * l[i], other_ll = ll - w[i] * l[i] * l[i];
      if (!(other_xl > 0 && other_ll > 0)) continue;
      const float moved = round_clamped(s[i] * other_ll / other_xl, 0, LAST);
      other_xl += w[i] * s[i] * moved;
      other_ll += w[i] * moved * moved;
      if (moved != l[i] && other_xl * other_xl * ll > xl * xl * other_ll) l[i] = moved, xl = other_xl, ll = other_ll;
    }
  for (int i = 0; i < N; i++) codes[i] = static_cast<uint8_t>(l[i]);
  return float_to_half(ll > 0 ? xl / ll : largest / LAST);
}

// The codes of N weights for the scale and minimum as they are stored: x ~ scale * (code - OFFSET) - minimum.
template <int N, int OFFSET, int LAST>
KT_NOINLINE void round_codes(const Groups<N>& g, const float* scale, const float* minimum, Codes<N>& codes) {
  for (int b = 0; b < Groups<N>::kBatches; b++) {
    const F32 s = load(scale + b * kLanes), m = minimum ? load(minimum + b * kLanes) : zero();
    F32 l[N];
    for (int i = 0; i < N; i++) {
      const F32 rounded = round_clamped((g.x[b][i] + m) / s, -OFFSET, LAST - OFFSET);
      l[i] = (s == 0.f ? zero() : rounded) + static_cast<float>(OFFSET);
    }
    codes.put(b, l);
  }
}

}  // namespace ktlinear::tinyblas::KT_TIER
