// Horizontal sums from quarter_sum(v), four partial sums in a 128-bit register, which the includer defines.
#pragma once

namespace ktlinear::tinyblas::KT_TIER {

KT_INLINE float sum(F32 v) {
  __m128 q = quarter_sum(v);
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
// The same sums of four vectors at once: the last two steps are a 4x4 transpose.
KT_INLINE void sum4(const F32* v, float* out) {
  const __m128 a = quarter_sum(v[0]), b = quarter_sum(v[1]), c = quarter_sum(v[2]), d = quarter_sum(v[3]);
  const __m128 ab = _mm_unpacklo_ps(a, b), cd = _mm_unpacklo_ps(c, d), ab2 = _mm_unpackhi_ps(a, b),
               cd2 = _mm_unpackhi_ps(c, d);
  const __m128 even = _mm_add_ps(_mm_movelh_ps(ab, cd), _mm_movelh_ps(ab2, cd2));
  const __m128 odd = _mm_add_ps(_mm_movehl_ps(cd, ab), _mm_movehl_ps(cd2, ab2));
  _mm_storeu_ps(out, _mm_add_ps(even, odd));
}

}  // namespace ktlinear::tinyblas::KT_TIER
