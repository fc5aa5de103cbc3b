// How the K-quants choose their scales: least squares over a few trials, as the reference (ggml) does, for one sub-block
// of N elements at a time. A squared error weighs x^2 for signed codes, |x| plus the root mean square where there is a
// minimum; Q2_K takes absolute errors, which weigh |x|.
#pragma once

#include "../scalar.h"

namespace ktlinear::tinyblas::KT_TIER {

inline constexpr float kTinyScale = 1e-15f;  // no smaller scale is inverted: fp16 holds none below 6e-8

// x rounded to nearest even and clamped to [low, high]; NaN gives low.
KT_INLINE float round_clamped(float x, float low, float high) {
  x = x > low ? x : low;
  x = x < high ? x : high;
  return (x + 12582912.f) - 12582912.f;
}

// The element of largest magnitude, the first of several.
template <int N>
KT_INLINE float extreme_of(const float* x) {
  float e = x[0];
  for (int i = 1; i < N; i++) e = __builtin_fabsf(x[i]) > __builtin_fabsf(e) ? x[i] : e;
  return e;
}

// x ~ scale * l, l in [-LEVELS, LEVELS): the trials round x by inverse scales -(LEVELS + 0.1 i) / extreme, i = -9..9;
// the scale is least squares for the codes of the best.
template <int N, int LEVELS>
inline float fit_signed(const float* x) {
  const float extreme = extreme_of<N>(x);
  if (__builtin_fabsf(extreme) < kTinyScale) return 0;
  float scale = 0, best = 0;
  auto attempt = [&](float inverse) {
    float xl = 0, ll = 0;
    for (int i = 0; i < N; i++) {
      const float l = round_clamped(inverse * x[i], -LEVELS, LEVELS - 1), w = x[i] * x[i];
      xl += w * x[i] * l;
      ll += w * l * l;
    }
    if (ll > 0 && xl * xl > best * ll) {
      scale = xl / ll;
      best = scale * xl;
    }
  };
  attempt(-LEVELS / extreme);
  for (int i = -9; i <= 9; i++)
    if (i != 0) attempt(-(LEVELS + 0.1f * static_cast<float>(i)) / extreme);
  return scale;
}

// The same by coordinate descent: five passes that move one code at a time to where it lessens the error.
template <int N, int LEVELS>
inline float descend_signed(const float* x) {
  const float extreme = extreme_of<N>(x);
  if (__builtin_fabsf(extreme) < kTinyScale) return 0;
  const float inverse = -LEVELS / extreme;
  float l[N], xl = 0, ll = 0;
  for (int i = 0; i < N; i++) {
    l[i] = round_clamped(inverse * x[i], -LEVELS, LEVELS - 1);
    xl += x[i] * x[i] * x[i] * l[i];
    ll += x[i] * x[i] * l[i] * l[i];
  }
  for (int pass = 0; pass < 5; pass++) {
    bool changed = false;
    for (int i = 0; i < N; i++) {
      const float w = x[i] * x[i];
      float other_xl = xl - w * x[i] * l[i], other_ll = ll - w * l[i] * l[i];
      if (!(other_xl > 0)) continue;
      const float moved = round_clamped(x[i] * other_ll / other_xl, -LEVELS, LEVELS - 1);
      if (moved == l[i]) continue;
      other_xl += w * x[i] * moved;
      other_ll += w * moved * moved;
      if (other_ll > 0 && other_xl * other_xl * ll > xl * xl * other_ll) {
        l[i] = moved;
        xl = other_xl;
        ll = other_ll;
        changed = true;
      }
    }
    if (!changed) break;
  }
  return ll > 0 ? xl / ll : 0;
}

struct Fit {
  float scale, minimum;  // x ~ scale * l - minimum
};

// x ~ scale * l - minimum, minimum >= 0, l in [0, LAST]: the trials round x - min by inverse scales
// (first + 0.1 i + LAST) / (max - min), i = 0..steps, and solve the weighted 2 x 2 least squares for scale and minimum.
// The best has the least weighted sum of squared, or of absolute, errors.
template <int N, int LAST, bool ABSOLUTE>
inline Fit fit_minimum(const float* x, const float* weight, float first, int steps) {
  float low = x[0], high = x[0], sum_w = weight[0], sum_x = weight[0] * x[0];
  for (int i = 1; i < N; i++) {
    low = x[i] < low ? x[i] : low;
    high = x[i] > high ? x[i] : high;
    sum_w += weight[i];
    sum_x += weight[i] * x[i];
  }
  low = low < 0 ? low : 0;
  const float span = high - low;
  if (span < kTinyScale) return {0, -low};
  auto error = [&](const float* l, float scale, float base) {
    float sum = 0;
    for (int i = 0; i < N; i++) {
      const float e = scale * l[i] + base - x[i];
      sum += weight[i] * (ABSOLUTE ? __builtin_fabsf(e) : e * e);
    }
    return sum;
  };
  auto codes = [&](float inverse, float* l) {
    for (int i = 0; i < N; i++) l[i] = round_clamped(inverse * (x[i] - low), 0, LAST);
  };
  float l[N], scale = span / LAST, base = low;
  codes(LAST / span, l);
  float best = error(l, scale, base);
  for (int step = 0; step <= steps; step++) {
    codes((first + 0.1f * static_cast<float>(step) + LAST) / span, l);
    float sum_l = 0, sum_ll = 0, sum_xl = 0;
    for (int i = 0; i < N; i++) {
      const float wl = weight[i] * l[i];
      sum_l += wl;
      sum_ll += wl * l[i];
      sum_xl += wl * x[i];
    }
    const float determinant = sum_w * sum_ll - sum_l * sum_l;
    if (!(determinant > 0)) continue;
    float this_scale = (sum_w * sum_xl - sum_x * sum_l) / determinant;
    float this_base = (sum_ll * sum_x - sum_l * sum_xl) / determinant;
    if (this_base > 0) {
      this_base = 0;
      this_scale = sum_xl / sum_ll;
    }
    const float e = error(l, this_scale, this_base);
    if (e < best) best = e, scale = this_scale, base = this_base;
  }
  return {scale, -base};
}

// Second level. Signed: d = extreme / -SPAN, codes in [-SPAN, SPAN). Unsigned: d = max / LAST, codes in [0, LAST].
template <int SPAN, int N>
inline uint16_t round_signed(const float (&s)[N], int8_t* codes) {
  const float extreme = extreme_of<N>(s);
  const bool zero = __builtin_fabsf(extreme) < kTinyScale;
  const float inverse = zero ? 0.f : -SPAN / extreme;
  for (int i = 0; i < N; i++) codes[i] = static_cast<int8_t>(round_clamped(inverse * s[i], -SPAN, SPAN - 1));
  return float_to_half(zero ? 0.f : 1.f / inverse);
}
template <int LAST, int N>
inline uint16_t round_unsigned(const float (&s)[N], uint8_t* codes) {
  float largest = 0;
  for (int i = 0; i < N; i++) largest = s[i] > largest ? s[i] : largest;
  const float inverse = largest < kTinyScale ? 0.f : LAST / largest;
  for (int i = 0; i < N; i++) codes[i] = static_cast<uint8_t>(round_clamped(inverse * s[i], 0, LAST));
  return float_to_half(largest / LAST);
}

// The codes of N weights for the scale and minimum as they are stored: x ~ scale * (code - OFFSET) - minimum.
template <int N, int OFFSET, int LAST>
inline void round_codes(const float* x, float scale, float minimum, uint8_t* codes) {
  for (int i = 0; i < N; i++)
    codes[i] = static_cast<uint8_t>(
        scale == 0 ? OFFSET : OFFSET + round_clamped((x[i] + minimum) / scale, -OFFSET, LAST - OFFSET));
}

}  // namespace ktlinear::tinyblas::KT_TIER
