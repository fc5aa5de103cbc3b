// Quantizers of the types whose codes are points of a grid: IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, IQ1_S, IQ1_M.
//
// The nearest point is found by looking at all of them. A point is two halves (of four elements in IQ1 and IQ2, of two
// in IQ3), the weighted squared error is the sum of theirs, and a half has no more than 81 or 64 values. So the errors
// of all halves are tabulated, for kLanes groups at once, and a point costs one minimum.
#pragma once

#include "../decode/grids.h"
#include "blocks.h"

namespace ktlinear::tinyblas {

// A grid with its points in order of their upper halves: those with upper half h are [begin[h], begin[h + 1]).
template <int HALVES, int N>
struct SortedGrid {
  uint16_t begin[HALVES + 1];
  uint8_t low[N];  // the lower half
  uint16_t index[N];
};
// Digits are `bits` wide. A half is the number whose digits they are, the first element's the lowest.
template <int HALVES, int DIGITS, int N>
consteval SortedGrid<HALVES, N> sort_grid(const uint16_t (&points)[N]) {
  constexpr int bits = DIGITS == 3 ? 2 : 4;
  auto half = [](uint32_t byte) {
    uint32_t value = 0;
    for (int shift = 8 - bits; shift >= 0; shift -= bits) value = value * DIGITS + (byte >> shift & ((1 << bits) - 1));
    return value;
  };
  SortedGrid<HALVES, N> grid{};
  uint16_t next[HALVES] = {};
  for (uint16_t point : points) grid.begin[half(point >> 8) + 1]++;
  for (int h = 0; h < HALVES; h++) next[h] = grid.begin[h], grid.begin[h + 1] += grid.begin[h];
  for (uint16_t i = 0; i < N; i++) {
    const uint16_t at = next[half(points[i] >> 8)]++;
    grid.low[at] = static_cast<uint8_t>(half(points[i] & 255));
    grid.index[at] = i;
  }
  return grid;
}
inline constexpr auto kSortedIQ2_XXS = sort_grid<81, 3>(kGridIQ2_XXS);
inline constexpr auto kSortedIQ2_XS = sort_grid<81, 3>(kGridIQ2_XS);
inline constexpr auto kSortedIQ2_S = sort_grid<81, 3>(kGridIQ2_S);
inline constexpr auto kSortedIQ3_XXS = sort_grid<64, 8>(kGridIQ3_XXS);
inline constexpr auto kSortedIQ3_S = sort_grid<64, 8>(kGridIQ3_S);
inline constexpr auto kSortedIQ1 = sort_grid<81, 3>(kGridIQ1);

}  // namespace ktlinear::tinyblas

namespace ktlinear::tinyblas::KT_TIER {

enum class Signs { kNone, kEven, kAny };  // kEven: of eight elements an even number is negative

// A type: its grid, the meaning of the digits, elements per scale, codes of scales, and w = d * (2 code + 1) * unit *
// (+- digit), in IQ1 d * (2 code + 1) * (digit +- 1/8). Trial scales bring the largest element to `first` times the
// largest digit, and `ratio` times the former.
template <const auto& POINTS, const auto& SORTED, const auto& DIGITS, int GROUP, int SCALE_CODES, Signs SIGNS,
          bool ONE_SHIFT = true>
struct GridType {
  static constexpr int kPoints = sizeof(POINTS) / sizeof(POINTS[0]), kDigits = sizeof(DIGITS) / sizeof(DIGITS[0]);
  static constexpr int kDim = kDigits == 3 ? 8 : 4, kHalves = kDigits == 3 ? 81 : 64;
  static constexpr int kGroup = GROUP, kScaleCodes = SCALE_CODES;
  static constexpr Signs kSigns = SIGNS;
  static constexpr bool kOneShift = ONE_SHIFT;  // of a group; else of each point
  static constexpr int kShifts = SIGNS == Signs::kNone ? 2 : 1;
  static constexpr const auto& kGrid = SORTED;
  static constexpr float digit(int i) { return static_cast<float>(DIGITS[i]); }
  static constexpr float shift(int i) { return kShifts == 1 ? 0.f : i == 0 ? 0.125f : -0.125f; }
  static constexpr float element(int point, int i) {
    constexpr int bits = 16 / kDim;
    return digit(POINTS[point] >> (bits * i) & ((1 << bits) - 1));
  }
};

template <class G>
class GridSearch {
 public:
  static constexpr int N = G::kGroup, kPointsEach = N / G::kDim;

  // The points chosen for a batch of groups, and which way they are shifted.
  struct Choice {
    uint16_t point[kPointsEach][kLanes];
    uint8_t shift[kPointsEach][kLanes];
  };

  // The least weighted error of each group at these scales.
  F32 error(const F32* x, const F32* w, F32 scale) {
    F32 group[G::kShifts] = {}, points = zero();
    for (int p = 0; p < kPointsEach; p++) {
      F32 best = zero();
      for (int s = 0; s < G::kShifts; s++) {
        tabulate(x + p * G::kDim, w + p * G::kDim, scale, G::shift(s));
        Int upper;
        const F32 e = cheapest(upper);
        group[s] += e;
        best = s == 0 ? e : min_of(best, e);
      }
      points += best;
    }
    if constexpr (G::kOneShift) return G::kShifts == 1 ? group[0] : min_of(group[0], group[G::kShifts - 1]);
    return points;
  }
  // The same with the points themselves.
  F32 choose(const F32* x, const F32* w, F32 scale, Choice& choice) {
    F32 errors[G::kShifts][kPointsEach], group[G::kShifts] = {};
    uint16_t found[G::kShifts][kPointsEach][kLanes];
    for (int p = 0; p < kPointsEach; p++)
      for (int s = 0; s < G::kShifts; s++) {
        tabulate(x + p * G::kDim, w + p * G::kDim, scale, G::shift(s));
        Int upper;
        errors[s][p] = cheapest(upper);
        group[s] += errors[s][p];
        for (int lane = 0; lane < kLanes; lane++) found[s][p][lane] = resolve(upper[lane], lane);
      }
    F32 sum = zero();
    for (int p = 0; p < kPointsEach; p++) {
      Mask second{};
      if constexpr (G::kShifts == 2) second = G::kOneShift ? group[1] < group[0] : errors[1][p] < errors[0][p];
      for (int lane = 0; lane < kLanes; lane++) {
        const int s = second[lane] ? G::kShifts - 1 : 0;
        choice.shift[p][lane] = static_cast<uint8_t>(s);
        choice.point[p][lane] = found[s][p][lane];
        sum[lane] += errors[s][p][lane];
      }
    }
    return sum;
  }
  // The elements of the points, to be multiplied by the scale.
  static void elements(const Choice& choice, F32* out) {
    for (int i = 0; i < N; i++) {
      float v[kLanes];
      for (int lane = 0; lane < kLanes; lane++)
        v[lane] = G::element(choice.point[i / G::kDim][lane], i % G::kDim) + G::shift(choice.shift[i / G::kDim][lane]);
      out[i] = load(v);
    }
  }

 private:
  F32 low_[G::kHalves], high_[G::kHalves];  // errors of the halves

  void tabulate(const F32* x, const F32* w, F32 scale, float shift) {
    F32 value[G::kDigits];
    for (int d = 0; d < G::kDigits; d++) value[d] = scale * (G::digit(d) + shift);
    tabulate_half(x, w, value, low_);
    tabulate_half(x + G::kDim / 2, w + G::kDim / 2, value, high_);
  }
  static void tabulate_half(const F32* x, const F32* w, const F32* value, F32* out) {
    constexpr int D = G::kDigits;
    F32 error[G::kDim / 2][D];
    for (int i = 0; i < G::kDim / 2; i++)
      for (int d = 0; d < D; d++) {
        const F32 e = x[i] - value[d];
        error[i][d] = w[i] * e * e;
      }
    F32 pairs[G::kDim / 4][D * D];
    for (int p = 0; p < G::kDim / 4; p++)
      for (int b = 0; b < D; b++)
        for (int a = 0; a < D; a++) pairs[p][b * D + a] = error[p * 2][a] + error[p * 2 + 1][b];
    if constexpr (G::kDim == 4) {
      for (int i = 0; i < D * D; i++) out[i] = pairs[0][i];
    } else {
      for (int b = 0; b < D * D; b++)
        for (int a = 0; a < D * D; a++) out[b * D * D + a] = pairs[0][a] + pairs[1][b];
    }
  }
  // The least error of all points, and the upper half of that point.
  F32 cheapest(Int& upper) const {
    F32 best = set1(__builtin_inff());
    upper = Int{};
    for (int h = 0; h < G::kHalves; h++) {
      const int begin = G::kGrid.begin[h], end = G::kGrid.begin[h + 1];
      if (begin == end) continue;
      F32 least = low_[G::kGrid.low[begin]];
      for (int p = begin + 1; p < end; p++) least = min_of(low_[G::kGrid.low[p]], least);
      least += high_[h];
      const Mask better = least < best;
      best = better ? least : best;
      upper = better ? Int{} + h : upper;
    }
    return best;
  }
  uint16_t resolve(int upper, int lane) const {
    int best = G::kGrid.begin[upper];
    for (int p = best + 1; p < G::kGrid.begin[upper + 1]; p++)
      if (low_[G::kGrid.low[p]][lane] < low_[G::kGrid.low[best]][lane]) best = p;
    return G::kGrid.index[best];
  }
};

// What a chunk becomes: points, signs and scales, for a block writer.
template <class G>
struct GridChunk {
  static constexpr int N = G::kGroup, kCount = kChunk / N, kEach = 256 / N, kPointsEach = N / G::kDim;
  uint16_t point[kChunk / G::kDim];
  uint8_t shift[kChunk / G::kDim];
  uint8_t signs[kChunk / 8];  // bit i: element i is negative
  uint8_t scale[kCount];
  uint16_t d[2];

  // Weights as ggml's with square_factor times the mean square; without an importance as if it were the same
  // everywhere.
  // `unit` as in GridType.
  KT_NOINLINE void search(const Source& s, float square_factor, float unit, float first, float ratio, int trials) {
    Groups<N> g(s.x);
    g.weigh(s, 256, square_factor);
    GridSearch<G> grid;
    if constexpr (G::kSigns != Signs::kNone)
      for (int b = 0; b < g.kBatches; b++) take_signs(g.x[b], g.w[b], b);
    float scales[kCount];
    typename GridSearch<G>::Choice choice;
    F32 q[N];
    for (int b = 0; b < g.kBatches; b++) {
      const F32 *x = g.x[b], *w = g.w[b];
      const F32 start = abs_of(extreme_of<N>(x)) / G::digit(G::kDigits - 1);
      F32 least = zero(), scale = zero();
      float factor = first;
      for (int t = 0; t < trials; t++, factor *= ratio) {
        const F32 trial = start * factor, e = grid.error(x, w, trial);
        const Mask better = e < least;
        scale = t == 0 ? trial : better ? trial : scale;
        least = t == 0 ? e : better ? e : least;
      }
      grid.choose(x, w, scale, choice);
      grid.elements(choice, q);
      F32 xq = zero(), qq = zero();
      for (int i = 0; i < N; i++) {
        xq += w[i] * x[i] * q[i];
        qq += w[i] * q[i] * q[i];
      }
      scale = ((xq > 0.f) & (qq > 0.f)) ? xq / qq : zero();
      store(scales + b * kLanes, scale / unit);
    }
    float each[2] = {};
    for (int i = 0; i < kCount; i++) each[i / kEach] = max_of(each[i / kEach], scales[i]);
    for (float& v : each) v /= static_cast<float>(2 * G::kScaleCodes - 1);
    // Codes of the scales and points for this d, then the d that suits them best.
    float xq[kCount], qq[kCount];
    for (int b = 0; b < g.kBatches; b++) {
      const F32 *x = g.x[b], *w = g.w[b];
      float unit_of[kLanes];
      for (int lane = 0; lane < kLanes; lane++) unit_of[lane] = each[(b * kLanes + lane) / kEach];
      const F32 d = load(unit_of),
                ideal = round_clamped(0.5f * (load(scales + b * kLanes) / d - 1.f), 0, G::kScaleCodes - 1);
      F32 least = zero(), code = zero();
      for (int t = -1; t <= 1; t++) {
        const F32 c = round_clamped(ideal + static_cast<float>(t), 0, G::kScaleCodes - 1);
        const F32 e = grid.error(x, w, d * unit * (2.f * c + 1.f));
        const Mask better = e < least;
        code = t == -1 ? c : better ? c : code;
        least = t == -1 ? e : better ? e : least;
      }
      grid.choose(x, w, d * unit * (2.f * code + 1.f), choice);
      grid.elements(choice, q);
      F32 sum_xq = zero(), sum_qq = zero();
      for (int i = 0; i < N; i++) {
        q[i] *= unit * (2.f * code + 1.f);
        sum_xq += w[i] * x[i] * q[i];
        sum_qq += w[i] * q[i] * q[i];
      }
      store(xq + b * kLanes, sum_xq);
      store(qq + b * kLanes, sum_qq);
      const Int codes = to_int(code);
      for (int lane = 0; lane < kLanes; lane++) {
        const int group = b * kLanes + lane;
        scale[group] = static_cast<uint8_t>(codes[lane]);
        for (int p = 0; p < kPointsEach; p++) {
          point[group * kPointsEach + p] = choice.point[p][lane];
          shift[group * kPointsEach + p] = choice.shift[p][lane];
        }
      }
    }
    for (int i = 0; i < 2; i++) {
      float sum_xq = 0, sum_qq = 0;
      for (int j = 0; j < kEach; j++) {
        sum_xq += xq[i * kEach + j];
        sum_qq += qq[i * kEach + j];
      }
      d[i] = float_to_half(sum_qq > 0 ? sum_xq / sum_qq : 0.f);
    }
  }

 private:
  // x becomes |x|. Where an odd number of eight is negative and the format cannot say so, the element that costs least
  // keeps a sign against its own.
  KT_INLINE void take_signs(F32* x, const F32* w, int b) {
    for (int k = 0; k < N / 8; k++, x += 8, w += 8) {
      Int bits{}, odd{}, flipped{};
      F32 least = set1(__builtin_inff());
      for (int i = 0; i < 8; i++) {
        const Mask negative = x[i] < 0.f;
        bits |= negative & (1 << i);
        odd ^= negative;
        x[i] = abs_of(x[i]);
        const F32 cost = w[i] * x[i];
        const Mask less = cost < least;
        least = less ? cost : least;
        flipped = less ? Int{} + i : flipped;
      }
      if constexpr (G::kSigns == Signs::kEven)
        for (int i = 0; i < 8; i++) {
          const Mask flip = odd & (flipped == i);
          x[i] = flip ? -x[i] : x[i];
          bits ^= flip & (1 << i);
        }
      for (int lane = 0; lane < kLanes; lane++)
        signs[(b * kLanes + lane) * (N / 8) + k] = static_cast<uint8_t>(bits[lane]);
    }
  }
};

// Codes of four bits, two to a byte.
template <int BYTES>
void put_nibbles(const uint8_t* codes, uint8_t* out) {
  for (int j = 0; j < BYTES; j++) out[j] = static_cast<uint8_t>(codes[2 * j] | codes[2 * j + 1] << 4);
}
// IQ2_XXS, IQ3_XXS: a scale's code above the signs of 4 x 8 elements, seven bits each.
inline uint32_t scale_and_signs(uint8_t scale, const uint8_t* signs) {
  uint32_t a = static_cast<uint32_t>(scale) << 28;
  for (int l = 0; l < 4; l++) a |= (signs[l] & 127u) << (7 * l);
  return a;
}

template <>
struct Quantizer<Type::IQ2_XXS> {
  using G = GridType<kGridIQ2_XXS, kSortedIQ2_XXS, kDigitsIQ2_XXS, 32, 16, Signs::kEven>;
  static void chunk(const Source& s, uint8_t* out) {
    GridChunk<G> c;
    c.search(s, 1, 0.125f, 1.2f, 0.93f, 13);
    for (int i = 0; i < 2; i++, out += sizeof(BlockIQ2_XXS)) {
      BlockIQ2_XXS block;
      block.d = c.d[i];
      for (int j = 0; j < 8; j++) {
        const int eight = i * 32 + j * 4;
        for (int l = 0; l < 4; l++) block.qs[j * 8 + l] = static_cast<uint8_t>(c.point[eight + l]);
        const uint32_t a = scale_and_signs(c.scale[i * 8 + j], c.signs + eight);
        std::memcpy(block.qs + j * 8 + 4, &a, 4);
      }
      std::memcpy(out, &block, sizeof block);
    }
  }
};

template <>
struct Quantizer<Type::IQ2_XS> {
  using G = GridType<kGridIQ2_XS, kSortedIQ2_XS, kDigitsIQ2_XS, 16, 16, Signs::kEven>;
  static void chunk(const Source& s, uint8_t* out) {
    GridChunk<G> c;
    c.search(s, 1, 0.125f, 1.2f, 0.93f, 13);
    for (int i = 0; i < 2; i++, out += sizeof(BlockIQ2_XS)) {
      BlockIQ2_XS block;
      block.d = c.d[i];
      for (int e = 0; e < 32; e++)
        block.qs[e] = static_cast<uint16_t>(c.point[i * 32 + e] | (c.signs[i * 32 + e] & 127) << 9);
      put_nibbles<8>(c.scale + i * 16, block.scales);
      std::memcpy(out, &block, sizeof block);
    }
  }
};

template <>
struct Quantizer<Type::IQ2_S> {
  using G = GridType<kGridIQ2_S, kSortedIQ2_S, kDigitsIQ2_S, 16, 16, Signs::kAny>;
  static void chunk(const Source& s, uint8_t* out) {
    GridChunk<G> c;
    c.search(s, 2, 0.125f, 1.2f, 0.93f, 13);
    for (int i = 0; i < 2; i++, out += sizeof(BlockIQ2_S)) {
      BlockIQ2_S block{};
      block.d = c.d[i];
      for (int e = 0; e < 32; e++) {
        const uint16_t point = c.point[i * 32 + e];
        block.qs[e] = static_cast<uint8_t>(point);
        block.qh[e / 4] = static_cast<uint8_t>(block.qh[e / 4] | point >> 8 << (e % 4 * 2));
        block.signs[e] = c.signs[i * 32 + e];
      }
      put_nibbles<8>(c.scale + i * 16, block.scales);
      std::memcpy(out, &block, sizeof block);
    }
  }
};

template <>
struct Quantizer<Type::IQ3_XXS> {
  using G = GridType<kGridIQ3_XXS, kSortedIQ3_XXS, kDigitsIQ3_XXS, 32, 16, Signs::kEven>;
  static void chunk(const Source& s, uint8_t* out) {
    GridChunk<G> c;
    c.search(s, 2, 0.25f, 1.3f, 0.94f, 13);
    for (int i = 0; i < 2; i++, out += sizeof(BlockIQ3_XXS)) {
      BlockIQ3_XXS block;
      block.d = c.d[i];
      for (int e = 0; e < 64; e++) block.qs[e] = static_cast<uint8_t>(c.point[i * 64 + e]);
      for (int j = 0; j < 8; j++) {
        const uint32_t a = scale_and_signs(c.scale[i * 8 + j], c.signs + i * 32 + j * 4);
        std::memcpy(block.a + j * 4, &a, 4);
      }
      std::memcpy(out, &block, sizeof block);
    }
  }
};

template <>
struct Quantizer<Type::IQ3_S> {
  using G = GridType<kGridIQ3_S, kSortedIQ3_S, kDigitsIQ3_S, 32, 16, Signs::kAny>;
  static void chunk(const Source& s, uint8_t* out) {
    GridChunk<G> c;
    c.search(s, 2, 1, 1.3f, 0.94f, 13);
    for (int i = 0; i < 2; i++, out += sizeof(BlockIQ3_S)) {
      BlockIQ3_S block{};
      block.d = c.d[i];
      for (int e = 0; e < 64; e++) {
        const uint16_t point = c.point[i * 64 + e];
        block.qs[e] = static_cast<uint8_t>(point);
        block.qh[e / 8] = static_cast<uint8_t>(block.qh[e / 8] | point >> 8 << (e % 8));
      }
      for (int e = 0; e < 32; e++) block.signs[e] = c.signs[i * 32 + e];
      put_nibbles<4>(c.scale + i * 8, block.scales);
      std::memcpy(out, &block, sizeof block);
    }
  }
};

template <>
struct Quantizer<Type::IQ1_S> {
  using G = GridType<kGridIQ1, kSortedIQ1, kDigitsIQ1, 32, 8, Signs::kNone>;
  static void chunk(const Source& s, uint8_t* out) {
    GridChunk<G> c;
    c.search(s, 2, 1, 1.f, 0.9f, 12);
    for (int i = 0; i < 2; i++, out += sizeof(BlockIQ1_S)) {
      BlockIQ1_S block;
      block.d = c.d[i];
      for (int j = 0; j < 8; j++) {
        uint32_t h = static_cast<uint32_t>(c.scale[i * 8 + j]) << 12 | static_cast<uint32_t>(c.shift[i * 32 + j * 4])
                                                                           << 15;
        for (int l = 0; l < 4; l++) {
          const uint16_t point = c.point[i * 32 + j * 4 + l];
          block.qs[j * 4 + l] = static_cast<uint8_t>(point);
          h |= static_cast<uint32_t>(point >> 8) << (3 * l);
        }
        block.qh[j] = static_cast<uint16_t>(h);
      }
      std::memcpy(out, &block, sizeof block);
    }
  }
};

template <>
struct Quantizer<Type::IQ1_M> {
  using G = GridType<kGridIQ1, kSortedIQ1, kDigitsIQ1, 16, 8, Signs::kNone, false>;
  static void chunk(const Source& s, uint8_t* out) {
    GridChunk<G> c;
    c.search(s, 2, 1, 1.f, 0.9f, 12);
    for (int i = 0; i < 2; i++, out += sizeof(BlockIQ1_M)) {
      BlockIQ1_M block{};
      for (int e = 0; e < 32; e++) {
        const uint16_t point = c.point[i * 32 + e];
        block.qs[e] = static_cast<uint8_t>(point);
        const int nibble = point >> 8 | c.shift[i * 32 + e] << 3;
        block.qh[e / 2] = static_cast<uint8_t>(block.qh[e / 2] | nibble << (e % 2 * 4));
      }
      for (int j = 0; j < 4; j++) {
        uint32_t word = static_cast<uint32_t>(c.d[i] >> (4 * j) & 15) << 12;
        for (int l = 0; l < 4; l++) word |= static_cast<uint32_t>(c.scale[i * 16 + j * 4 + l]) << (3 * l);
        const uint16_t half = static_cast<uint16_t>(word);
        std::memcpy(block.scales + j * 2, &half, 2);
      }
      std::memcpy(out, &block, sizeof block);
    }
  }
};

}  // namespace ktlinear::tinyblas::KT_TIER
