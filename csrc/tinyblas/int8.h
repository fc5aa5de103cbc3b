// int8 mode: x quantized per 32 elements, integer products, exact sums inside a group, fp32 across groups.
//
//   y = sum over groups of  s * dx * isum  [ + m * dx * xsum ],   isum = sum of (u - offset) * q,   x ~ dx * q,   xsum = sum of q
//
// From integer to both scales in two FMAs: a group's sum starts at the bits of the float MAGIC = 1.5 * 2^23, minus
// offset * xsum. While |isum| < 2^22 the sum, read as a float, is exactly MAGIC + isum, so
//   t = fma(sum, dx, -MAGIC * dx) = dx * isum, rounded once;   C = fma(t, s, C)
// dx is rounded up to 12 significant bits, which makes MAGIC * dx exact.
//
// Formats with a scale per 16 elements take each half of a group on its own (four FMAs instead of two), unless the
// product of code and sub-scale fits a byte: then that is the code (`Folded`), where the tier multiplies all unsigned
// bytes. With VNNI and zmm the two sums are converted (vcvtdq2ps has ports of its own on Zen 4) and meet before dx: a
// product and two FMAs,
//   C += dx * (s0 * isum0 + s1 * isum1)
//
// Quantized x, for each K slice, for each tile of R rows, for each group: one record of R * 44 bytes or more
//   | R x 32 int8 q | [starts][R] start | [minima][R] sum | R x fp32 dx | R x fp32 -MAGIC * dx |
//   start, one per scale: int32 MAGIC - offset * xsum; none for a format with minima: its codes have no offset
//   sum, one per minimum: fp32 dx * xsum
// The products of maddubs_dot.h have other starts, and may have int16 q.
//
// Minima that are integers times one dmin per super-block (K-quants) take no FMA in each group, where the tier
// multiplies pairs of int16: the sums dx * xsum of a super-block are rounded to int16 with one scale ds, a power of
// two, and
//   y += dmin * ds * (sum of m * t),   t ~ dx * xsum / ds,   |sum| <= 8 * 63 * 32767 < 2^24, exact as fp32
// A tail follows the records of the super-block's eight groups: | [pairs][R] two int16 t | R x fp32 ds |. Pair j is
// sub-blocks i and i + 2, i = 4 (j / 2) + j % 2, as shifts and masks of a word of four minima give them.
//
// Special values: a group with NaN or infinity has dx = NaN, and so has its output; a group whose amax is below 2^-118
// (its scale would be subnormal) counts as zero; amax above 2^100 would overflow MAGIC * dx and is refused: the caller
// goes exact.
#pragma once

#include <type_traits>

#include "formats_list.h"
#include "gemm.h"
#include "records.h"

namespace ktlinear::tinyblas::KT_TIER {

inline constexpr int kPanelVectors = kPanelRows / kLanes;

// What the micro-kernels know of a format. Formats of one kind share them.
template <int SCALES, bool MINIMA, int PAIRS, class DOT>
struct Kind {
  static constexpr int kScales = SCALES;                         // per group of 32: 1, or 2 (of 16 elements each)
  static constexpr int kPairs = PAIRS;                           // of minima of a super-block, as integers
  static constexpr int kMinima = MINIMA && !PAIRS ? SCALES : 0;  // per group
  static constexpr int kParts =
      DOT::kParts ? DOT::kParts : SCALES;  // a group's sums: a scale has one, or several in turn
  static constexpr int kStarts = DOT::kParts ? kParts : MINIMA ? 0 : SCALES;
  // Two scales: sums start without MAGIC and are converted. See above.
  static constexpr bool kConverts = SCALES == 2 && DOT::kAllBytes && kLanes == 16;
  static constexpr int kXBytes = DOT::kXBytes;                             // of one row of x in one group: q
  static constexpr int kRowBytes = kXBytes + 4 * (kStarts + kMinima + 2);  // all
  static constexpr int kTailBytes = PAIRS ? 4 * (PAIRS + 1) : 0;           // in one super-block
  static constexpr int first_step(int part) { return (8 * part + kParts - 1) / kParts; }
  static constexpr int first_part(int scale) { return kParts * scale / SCALES; }
  using Dot = DOT;
};
template <class D>
constexpr int minimum_pairs() {
  if constexpr (DotFor<D>::kPairs && requires { D::kMinimumPairs; }) return D::kMinimumPairs;
  return 0;
}
template <class D>
using KindOf = Kind<D::kScales, D::kHasMinimum, minimum_pairs<D>(), DotFor<D>>;
// What the product takes off the codes of a format with minima, so that they fit; the minima make up for it.
template <class D>
inline constexpr int kRecentred = D::kHasMinimum && DotFor<D>::kParts ? (D::kMaxCode + 1) / 2 : 0;
template <class D>
KT_INLINE F32 minimum_of(const uint8_t* record, int group, int i, int v, F32 scale) {
  const F32 minimum = D::minimum(record, group, i, v);
  return kRecentred<D> ? fma(set1(static_cast<float>(kRecentred<D>)), scale, minimum) : minimum;
}

// The view of a format that the kernels here take. Folded, a format with minima has two of them but one scale in a
// group: only pairs can take them.
template <class D>
struct IntegerView {
  using type = D;
};
template <class D>
  requires(Dot::kAllBytes && requires { typename D::Folded; } && (Dot::kPairs || !D::kHasMinimum))
struct IntegerView<D> {
  using type = typename D::Folded;
};

template <class D>
KT_INLINE int64_t padded_groups(int64_t k) {
  return ceil_div(k, D::kGroups * 32) * D::kGroups;
}
// First record of the tile at `row`, for the K slice [k, k + kc).
template <class D>
KT_INLINE int64_t record_offset(int64_t m, int64_t row, int64_t k, int64_t kc) {
  const int64_t groups = k / 32 * m + row * padded_groups<D>(kc);
  return groups * KindOf<D>::kRowBytes + groups / 8 * KindOf<D>::kTailBytes;
}

// Where a super-block's sum i goes, so that pairs are neighbours.
constexpr int place_of_sum(int i) { return i / 4 * 4 + i % 2 * 2 + i / 2 % 2; }

// `totals`: the sums dx * xsum of one row, K::kPairs / 4 of a group.
template <class K>
KT_INLINE bool quantize_group(const F32 (&x)[32 / kLanes], uint8_t* record, int r, int rows, int offset, int group,
                              float* totals) {
  constexpr int sums = K::kPairs ? K::kPairs / 4 : K::kScales, vectors = 32 / kLanes, per_sum = vectors / sums;
  I32 peak = splat_i32(0);
  KT_UNROLL for (const F32& v : x)
    peak = max_i32(peak, band(as_i32(v), splat_i32(0x7FFFFFFF)));
  const int32_t amax_bits = max_lane(peak);  // ordered like the magnitudes, NaN above infinity above all others
  const float amax = bits_as<float>(amax_bits);
  I32 q[vectors];
  KT_UNROLL for (I32& v : q)
    v = splat_i32(0);
  float dx = 0;
  if (amax_bits >= 0x7F800000) {
    dx = __builtin_nanf("");
  } else if (amax > 0x1p100f) {
    return false;
  } else if (amax >= 0x1p-118f) {
    dx = bits_as<float>((bits_as<uint32_t>(amax / 127.f) + 0xFFFu) & 0xFFFFF000u);
    const F32 inverse = set1(1.f / dx);
    KT_UNROLL for (int i = 0; i < vectors; i++)
      q[i] = round_i32(mul(x[i], inverse));
  }
  K::Dot::store_x(record + r * K::kXBytes, q);
  int32_t xsum[sums];
  KT_UNROLL for (int h = 0; h < sums; h++) {
    I32 total = q[h * per_sum];
    KT_UNROLL for (int i = h * per_sum + 1; i < (h + 1) * per_sum; i++)
      total = add_i32(total, q[i]);
    xsum[h] = sum_lanes(total);
  }
  float* meta = reinterpret_cast<float*>(record + rows * K::kXBytes) + r;
  int32_t starts[K::kStarts + 1];
  if constexpr (K::Dot::kParts)
    K::Dot::starts(q, offset, starts);
  else
    for (int h = 0; h < K::kStarts; h++) starts[h] = (K::kConverts ? 0 : kMagicBits) - offset * xsum[h];
  KT_UNROLL for (int i = 0; i < K::kStarts; i++, meta += rows)
    *meta = bits_as<float>(starts[i]);
  KT_UNROLL for (int h = 0; h < K::kMinima; h++, meta += rows)
    *meta = dx * static_cast<float>(xsum[h]);
  if constexpr (K::kPairs > 0)
    for (int h = 0; h < sums; h++) totals[place_of_sum(group * sums + h)] = dx * static_cast<float>(xsum[h]);
  meta[0] = dx;
  meta[rows] = -kMagic * dx;
  return true;
}

// The tail of row r from the sums of its super-block.
template <class K>
KT_INLINE void quantize_sums(const float (&totals)[16], uint8_t* tail, int r, int rows) {
  F32 sums[16 / kLanes];
  I32 peak = splat_i32(0);
  KT_UNROLL for (int i = 0; i < 16 / kLanes; i++) {
    sums[i] = load(totals + i * kLanes);
    peak = max_i32(peak, band(as_i32(sums[i]), splat_i32(0x7FFFFFFF)));
  }
  // A power of two, so that sums of integers stay integers; with 2^-13 to spare, so that t does not round up to 2^15.
  const float amax = bits_as<float>(max_lane(peak));
  const uint32_t exponent = bits_as<uint32_t>(amax * (1.f + 0x1p-13f)) & 0x7F800000u;
  float scale = bits_as<float>(exponent - (14u << 23));
  if (exponent < 15u << 23) scale = 0x1p-126f;  // far below the rounding of x, whose scale is at least 2^-125
  const F32 inverse = set1(1.f / scale);
  if (exponent == 0x7F800000u) scale = __builtin_nanf("");  // a group with NaN or infinity
  uint16_t t[16];
  KT_UNROLL for (int i = 0; i < 16 / kLanes; i++)
    store_low_16(reinterpret_cast<uint8_t*>(t + i * kLanes), round_i32(mul(sums[i], inverse)));
  KT_UNROLL for (int j = 0; j < K::kPairs; j++)
    std::memcpy(tail + (j * rows + r) * 4, t + 2 * j, 4);
  std::memcpy(tail + (K::kPairs * rows + r) * 4, &scale, 4);
}

// K of x that one unit quantizes, at small M: a single tile is shared by the threads. K slices are parts of it or all
// of K.
inline constexpr int kPrepareKC = 1024;

KT_INLINE int64_t prepare_chunk(const Problem& p, const Plan& plan) { return plan.path == kDirect ? kPrepareKC : p.k; }

// Units [begin, end) of x: chunks of K of a tile, then of the next.
template <class D>
KT_INLINE bool quantize_x(const Problem& p, const Plan& plan, uint8_t* out, int64_t begin, int64_t end) {
  using K = KindOf<D>;
  constexpr int offset = kRecentred<D> ? kRecentred<D> : D::kOffset;
  const int64_t chunk = prepare_chunk(p, plan), chunks = ceil_div(p.k, chunk);
  const Parts tiles(p.m, plan.tiles);
  for (int64_t unit = begin; unit < end; unit++) {
    const int64_t t = unit / chunks, stop = min_of(p.k, (unit % chunks + 1) * chunk);
    const int64_t row = tiles.begin(t);
    const int rows = tiles.count(t);
    for (int64_t k0 = unit % chunks * chunk, kc; k0 < stop; k0 += kc) {
      const int64_t slice = k0 / plan.kc * plan.kc, slice_kc = min_of<int64_t>(plan.kc, p.k - slice);
      kc = min_of(stop, slice + slice_kc) - k0;
      const int64_t first = (k0 - slice) / 32, groups = padded_groups<D>(kc);
      uint8_t* o =
          out + record_offset<D>(p.m, row, slice, slice_kc) + rows * (first * K::kRowBytes + first / 8 * K::kTailBytes);
      for (int r = 0; r < rows; r++) {
        const int64_t x = x_index(p, row + r, k0);
        uint8_t* record = o;
        float totals[16] = {};
        for (int64_t g = 0; g < groups; g++, record += rows * K::kRowBytes) {
          F32 v[32 / kLanes];
          KT_UNROLL for (int i = 0; i < 32 / kLanes; i++)
            v[i] = g * 32 < kc ? load_float(p.x, p.x_type, x + g * 32 + i * kLanes) : zero();
          if (!quantize_group<K>(v, record, r, rows, offset, static_cast<int>(g % 8), totals)) return false;
          if (K::kPairs > 0 && g % 8 == 7) {
            quantize_sums<K>(totals, record + rows * K::kRowBytes, r, rows);
            record += rows * K::kTailBytes;
          }
        }
      }
    }
  }
  return true;
}

// Where a part's sum starts.
template <class K>
KT_INLINE const void* start_of(const float* meta, int i) {
  static constexpr int32_t magic = kMagicBits;
  return K::kStarts ? meta + i : static_cast<const void*>(&magic);
}

// ---------------------------------------------------------------- small M: weights decoded in registers

// Bytes of software prefetch, with zmm to L2: more lines can be on their way there than to L1. With ymm, whose loads
// are twice as many, to L1: Q4_K reads 42 GB/s instead of 34. A constant, or the addresses fill the registers.
inline constexpr bool kDirectToL1 = kLanes == 8;
inline constexpr int kDirectAhead = kDirectToL1 ? 2304 : 3072;
inline constexpr int kDirectWhole = 1 << 20;  // K slice of a single tile on packed weights: as good as all of it
inline constexpr int kPlainKC = 1024;         // of plain rows, packed into scratch: longer runs of each row, in L2
inline constexpr int kDirectRows = 8;         // of x in a tile
inline constexpr int kDirectKC = 512;         // K slice that several tiles of x share in L1
static_assert(kPrepareKC % kPlainKC == 0 && kPrepareKC % kDirectKC == 0);

// Panels that advance together: sequential streams for the prefetcher. R * P fp32 sums and R int32 ones per vector of a
// panel (twice as many where they are converted): at most 24 of 32 registers. Eight streams are no faster at M = 1 on
// large matrices, and slower on 576 x 576, where a thread has 18 panels in all. Eight rows that share W in L1 with
// another tile take one panel: it is the registers that count there (M = 16: 3 to 8 % faster). Two are faster with ymm
// (Q4_K 49 GB/s instead of 35); where x is int16, three rows leave room for one (Q8_0, M = 4: 540 us instead of 740).
// With four lanes a panel is four vectors: two streams of two rows are 16 sums.
template <class K>
constexpr int streams(int rows, int tiles) {
  if (kLanes == 4) return rows <= 2 ? 2 : 1;
  if (kLanes == 8) return rows > 2 && K::kXBytes > 32 ? 1 : 2;
  if (rows == kDirectRows && (tiles > 1 || K::kConverts)) return 1;
  return rows <= 4 ? 4 : 2;
}

inline constexpr int kMaxStreams = 4;

struct DirectTile {
  const uint8_t* w[kMaxStreams];  // records of each panel
  int64_t records;
  const uint8_t* x;  // quantized rows
  float* c;          // [panel, c_stride floats apart][row][16]
  int64_t c_stride;
  bool accumulate;
};

// c[P][R][16] (+)= R rows of x by P panels. Per group, panel and vector: 8 decoded steps, 8 R products, 2 R FMAs.
template <class D, int R, int P>
KT_NOINLINE void direct_tile(const DirectTile& t) {
  using K = KindOf<D>;
  using Dot = typename K::Dot;
  constexpr int V = K::kXBytes == 64 ? kPanelVectors : 1;  // int16 x: two broadcasts a step, shared by the vectors
  F32 acc[P][R][kPanelVectors];
  auto each_sum = [&](auto f) KT_ALWAYS_INLINE_LAMBDA {
    KT_UNROLL for (int p = 0; p < P; p++) {
      KT_UNROLL for (int r = 0; r < R; r++) {
        KT_UNROLL for (int v = 0; v < kPanelVectors; v++)
          f(acc[p][r][v], t.c + p * t.c_stride + r * kPanelRows + v * kLanes);
      }
    }
  };
  each_sum([&](F32& sum, const float* c) KT_ALWAYS_INLINE_LAMBDA { sum = t.accumulate ? load(c) : zero(); });
  constexpr int lines = D::kRecordBytes / 64, share = (lines + D::kGroups - 1) / D::kGroups;  // of a group
  const uint8_t *w[P], *x = t.x;
  KT_UNROLL for (int p = 0; p < P; p++)
    w[p] = t.w[p];
  for (int64_t i = 0; i < t.records * D::kRecordBytes; i += D::kRecordBytes) {
    _Pragma("GCC unroll 2") for (int g = 0; g < D::kGroups; g++, x += R * K::kRowBytes) {
      const float* meta = reinterpret_cast<const float*>(x + R * K::kXBytes);
      const float *sums = meta + K::kStarts * R, *dx = sums + K::kMinima * R, *ndx = dx + R;
      KT_UNROLL for (int p = 0; p < P; p++) {
        const uint8_t* rec = w[p] + i;
        // The lines of a record are shared out over its groups.
        const uint8_t* fetch = rec + kDirectAhead + lines * g / D::kGroups * 64;
        KT_UNROLL for (int v = 0; v < kPanelVectors; v += V) {
          F32 halves[R][V];  // kConverts
          for_steps<0, K::kScales>([&]<int H>() KT_ALWAYS_INLINE_LAMBDA {
            I32 isum[R][V];
            for_steps<K::first_part(H), K::first_part(H + 1)>([&]<int I>() KT_ALWAYS_INLINE_LAMBDA {
              I32 a[R][V];
              KT_UNROLL for (int r = 0; r < R; r++) {
                KT_UNROLL for (int j = 0; j < V; j++)
                  a[r][j] = Dot::begin(start_of<K>(meta, I * R + r));
              }
              for_steps<K::first_step(I), K::first_step(I + 1)>([&]<int S>() KT_ALWAYS_INLINE_LAMBDA {
                // Spread over the steps: all at once they would wait for a free line buffer, and the products with
                // them.
                if (v == 0) {
                  opaque(fetch);
                  for (int l = share * S / 8; l < share * (S + 1) / 8; l++)
                    kDirectToL1 ? prefetch_l1(fetch + l * 64) : prefetch_l2(fetch + l * 64);
                }
                I32 u[V];
                KT_UNROLL for (int j = 0; j < V; j++)
                  u[j] = D::template code<S>(rec, g, v + j);
                KT_UNROLL for (int r = 0; r < R; r++)
                  Dot::step(a[r], u, x + r * K::kXBytes + S * (K::kXBytes / 8));
              });
              KT_UNROLL for (int r = 0; r < R; r++) {
                KT_UNROLL for (int j = 0; j < V; j++) {
                  if constexpr (I == K::first_part(H))
                    isum[r][j] = Dot::end(a[r][j], start_of<K>(meta, I * R + r));
                  else
                    isum[r][j] = add_i32(isum[r][j], Dot::widen(a[r][j]));
                }
              }
            });
            KT_UNROLL for (int j = 0; j < V; j++) {
              const F32 scale = D::scale(rec, g, H, v + j);
              KT_UNROLL for (int r = 0; r < R; r++) {
                F32& sum = acc[p][r][v + j];
                if constexpr (!K::kConverts)
                  sum = fma(fma(as_f32(isum[r][j]), set1(dx[r]), set1(ndx[r])), scale, sum);
                else if constexpr (H == 0)
                  halves[r][j] = mul(to_f32(isum[r][j]), scale);
                else
                  sum = fma(fma(to_f32(isum[r][j]), scale, halves[r][j]), set1(dx[r]), sum);
              }
              if constexpr (K::kMinima > 0) {
                const F32 minimum = minimum_of<D>(rec, g, H, v + j, scale);
                KT_UNROLL for (int r = 0; r < R; r++)
                  acc[p][r][v + j] = fma(minimum, set1(sums[H * R + r]), acc[p][r][v + j]);
              }
            }
          });
        }
      }
    }
    if constexpr (K::kPairs > 0) {
      const float* ds = reinterpret_cast<const float*>(x + K::kPairs * R * 4);
      KT_UNROLL for (int p = 0; p < P; p++) {
        KT_UNROLL for (int v = 0; v < kPanelVectors; v++) {
          I32 isum[R];
          KT_UNROLL for (int r = 0; r < R; r++)
            isum[r] = splat_i32(0);
          for_steps<0, K::kPairs>([&]<int J>() KT_ALWAYS_INLINE_LAMBDA {
            const I32 pair = D::template minimum_pair<J>(w[p] + i, v);
            KT_UNROLL for (int r = 0; r < R; r++)
              isum[r] = Dot::pairs(isum[r], pair, x + (J * R + r) * 4);
          });
          const F32 dmin = D::minus_dmin(w[p] + i, v);
          KT_UNROLL for (int r = 0; r < R; r++)
            acc[p][r][v] = fma(mul(to_f32(isum[r]), dmin), set1(ds[r]), acc[p][r][v]);
        }
      }
      x += R * K::kTailBytes;
    }
  }
  each_sum([&](F32 sum, float* c) KT_ALWAYS_INLINE_LAMBDA { store(c, sum); });
}

template <class D>
KT_INLINE void direct_rows(int rows, int panels, const DirectTile& t) {
  with_rows<min_of(kDirectRows, kBlocking.direct_max)>(rows, [&]<int R>() {
    constexpr int own = streams<KindOf<D>>(R, 1), other = streams<KindOf<D>>(min_of(R + 1, kDirectRows), 2);
    if constexpr (kBlocking.direct_max > kDirectRows &&
                  own != other)  // the shorter one of two tiles, or one of eight rows
      if (panels == other) return direct_tile<D, R, other>(t);
    direct_tile<D, R, own>(t);
  });
}

// `count` panels, `run` panels apart, the first one `panel`; all of x. C is [stream][M][16].
template <class D>
KT_INLINE void direct_panels(const Problem& p, const Plan& plan, const uint8_t* x, float* c, uint8_t* scratch,
                             int64_t panel, int64_t run, int count) {
  const Records<D> records{p};
  const Parts tiles(p.m, plan.tiles);
  for (int64_t k = 0; k < p.k; k += plan.kc) {
    const int64_t kc = min_of<int64_t>(plan.kc, p.k - k);
    DirectTile t{};
    t.records = ceil_div(kc, Records<D>::kK);
    t.c_stride = p.m * kPanelRows;
    t.accumulate = k > 0;
    // Streams without a panel read the last one again; their sums are not stored.
    for (int i = 0; i < plan.block_panels; i++)
      t.w[i] = i < count ? records.get((panel + i * run) * kPanelRows, k, kc, scratch + i * t.records * D::kRecordBytes)
                         : t.w[i - 1];
    for (int i = 0; i < plan.tiles; i++) {
      const int64_t row = tiles.begin(i);
      const int rows = tiles.count(i);
      t.x = x + record_offset<D>(p.m, row, k, kc);
      t.c = c + row * kPanelRows;
      direct_rows<D>(rows, plan.block_panels, t);
    }
  }
  for (int i = 0; i < count; i++) {
    const int64_t n = (panel + i * run) * kPanelRows;
    for (int64_t m = 0; m < p.m; m++)
      store_outputs<kPanelRows>(p, m, n, c + (i * p.m + m) * kPanelRows, min_of<int64_t>(kPanelRows, p.n - n));
  }
}

// Panels [begin, end): stream i walks the i-th part, each a contiguous run; then the remainder.
template <class D>
KT_INLINE void direct(const Problem& p, const Plan& plan, const uint8_t* x, void* scratch, int64_t begin, int64_t end) {
  float* c = static_cast<float*>(scratch);
  uint8_t* packed = reinterpret_cast<uint8_t*>(c + int64_t{plan.block_panels} * p.m * kPanelRows);
  const int64_t run = (end - begin) / plan.block_panels, rest = (end - begin) % plan.block_panels;
  for (int64_t i = 0; i < run; i++) direct_panels<D>(p, plan, x, c, packed, begin + i, run, plan.block_panels);
  if (rest > 0) direct_panels<D>(p, plan, x, c, packed, end - rest, 1, static_cast<int>(rest));
}

// ---------------------------------------------------------------- large M: int8 panels

// Panel, one record per group: | 8 steps x PV vectors of codes | for each scale: PV vectors | for each minimum: PV
// vectors | With pairs of minima, after eight groups: | for each pair: PV vectors | PV vectors of -dmin |
inline constexpr int kIntPanels = kBlocking.int_panels, kPV = kIntPanels * kPanelVectors, kPanelStep = kPV * kLanes * 4;
template <class K>
inline constexpr int kGroupBytes = (8 + K::kScales + K::kMinima) * kPanelStep;
template <class K>
inline constexpr int kPairBytes = K::kPairs ? (K::kPairs + 1) * kPanelStep : 0;

// C[R][kIntPanels * 16] (+)= R rows of x by the panel. Per group and vector of sums: 8 products, 2 FMAs (3 with
// minima):
// ceiling 80 % (73 %) of the product's peak where it shares its ports with the FMA. Minima in pairs: 8 groups take 64
// products, 16 FMAs, and 4 (Q2_K 8) products of pairs, a conversion, a product and an FMA more: 74 % (71 %). Two
// scales: 8 products, 3 of fp32 and 2 conversions: 73 %; the first halves take C's registers, and C stays in L1.
//   zmm vpdpbusd, 7 x 2: 14 int32 sums + 14 fp32 sums + 2 weights + 1 broadcast = 31 of 32 registers. On the machines measured each
//     load costs a little (a hot 6 x 2 runs at 62 % of the peak, 7 x 2 at 65 %), so the largest tile wins.
//   ymm: C stays in L1: 12 (or 8) int32 sums + 2 weights + 1 broadcast (+ 1 product) of 16
template <class K, int R>
KT_NOINLINE void tile_int8(const uint8_t* x, const uint8_t* w, int64_t groups, float* c, bool accumulate,
                           const Fetch& ahead) {
  Fetch fetch = ahead;
  using Dot = typename K::Dot;
  constexpr bool in_registers = kBlocking.c_in_registers && !K::kConverts;
  F32 acc[R][kPV];  // C, or its first halves
  // By templates and not by loops: or GCC unrolls too late to keep all sums off the stack.
  auto each = [&](auto f) KT_ALWAYS_INLINE_LAMBDA {
    for_steps<0, R * kPV>([&]<int I>() KT_ALWAYS_INLINE_LAMBDA { f(I / kPV, I % kPV, c + I * kLanes); });
  };
  if constexpr (in_registers)
    each([&](int r, int v, float* p) KT_ALWAYS_INLINE_LAMBDA { acc[r][v] = zero(), prefetch_l1(p); });
  else if (!accumulate)
    each([&](int, int, float* p) KT_ALWAYS_INLINE_LAMBDA { store(p, zero()); });
  for (int64_t g = 0; g < groups; g++, w += kGroupBytes<K>, x += R * K::kRowBytes) {
    fetch.step<32>();
    const float* meta = reinterpret_cast<const float*>(x + R * 32);
    const float *sums = meta + K::kStarts * R, *dx = sums + K::kMinima * R, *ndx = dx + R;
    for_steps<0, K::kScales>([&]<int H>() KT_ALWAYS_INLINE_LAMBDA {
      I32 a[R][kPV];
      const uint8_t* start = static_cast<const uint8_t*>(start_of<K>(meta, H * R));
      if constexpr (K::kStarts == 0) opaque(start);  // read anew: in a register it would drive a sum out
      each([&](int r, int v, float*) KT_ALWAYS_INLINE_LAMBDA {
        const int from = K::kStarts ? r : 0;
        a[r][v] = r == from && v == 0 ? Dot::begin(start + r * 4) : a[from][0];
      });
      constexpr int begin = K::first_step(H), end = K::first_step(H + 1);
      KT_UNROLL for (int s = begin; s < end; s++) {
        I32 u[kPV];
        KT_UNROLL for (int v = 0; v < kPV; v++)
          u[v] = load_i(w + s * kPanelStep + v * kLanes * 4);
        for_steps<0, R>([&]<int r>() KT_ALWAYS_INLINE_LAMBDA { Dot::row(a[r], u, x + r * 32 + s * 4); });
      }
      const float* scales = reinterpret_cast<const float*>(w + (8 + H) * kPanelStep);
      const float* minima = reinterpret_cast<const float*>(w + (8 + K::kScales + H) * kPanelStep);
      F32 scale[kPV];
      KT_UNROLL for (int v = 0; v < kPV; v++)
        scale[v] = load(scales + v * kLanes);
      each([&](int r, int v, float* p) KT_ALWAYS_INLINE_LAMBDA {
        const I32 isum = Dot::end(a[r][v], start_of<K>(meta, H * R + r));
        if constexpr (K::kConverts) {
          if constexpr (H == 0)
            acc[r][v] = mul(to_f32(isum), scale[v]);
          else
            store(p, fma(fma(to_f32(isum), scale[v], acc[r][v]), set1(dx[r]), load(p)));
          return;
        }
        const F32 t = fma(as_f32(isum), set1(dx[r]), set1(ndx[r]));
        F32 sum = fma(t, scale[v], in_registers ? acc[r][v] : load(p));
        if constexpr (K::kMinima > 0) sum = fma(load(minima + v * kLanes), set1(sums[H * R + r]), sum);
        if constexpr (in_registers)
          acc[r][v] = sum;
        else
          store(p, sum);
      });
      if constexpr (!in_registers) asm volatile("" ::: "memory");  // or C lives on the stack as well
    });
    if constexpr (K::kPairs > 0) {
      if (g % 8 < 7) continue;
      const uint8_t *pairs = w + kGroupBytes<K>, *tail = x + R * K::kRowBytes;
      const float* dmin = reinterpret_cast<const float*>(pairs + K::kPairs * kPanelStep);
      const float* ds = reinterpret_cast<const float*>(tail + K::kPairs * R * 4);
      I32 a[R][kPV];
      each([&](int r, int v, float*) KT_ALWAYS_INLINE_LAMBDA { a[r][v] = splat_i32(0); });
      KT_UNROLL for (int j = 0; j < K::kPairs; j++) {
        I32 m[kPV];
        KT_UNROLL for (int v = 0; v < kPV; v++)
          m[v] = load_i(pairs + j * kPanelStep + v * kLanes * 4);
        for_steps<0, R>([&]<int r>() KT_ALWAYS_INLINE_LAMBDA { Dot::pairs_row(a[r], m, tail + (j * R + r) * 4); });
      }
      each([&](int r, int v, float* p) KT_ALWAYS_INLINE_LAMBDA {
        const F32 t = mul(to_f32(a[r][v]), load(dmin + v * kLanes));
        if constexpr (in_registers)
          acc[r][v] = fma(t, set1(ds[r]), acc[r][v]);
        else
          store(p, fma(t, set1(ds[r]), load(p)));
      });
      if constexpr (!in_registers) asm volatile("" ::: "memory");
      w += kPairBytes<K>, x += R * K::kTailBytes;
    }
  }
  if constexpr (in_registers)
    each([&](int r, int v, float* p)
             KT_ALWAYS_INLINE_LAMBDA { store(p, accumulate ? add(acc[r][v], load(p)) : acc[r][v]); });
}

// How a panel is made and multiplied where the product takes all unsigned bytes; maddubs.h has the other way.
template <class D>
struct BytePanel {
  using K = KindOf<D>;
  static constexpr int kTileRows = kBlocking.int_mr;
  static constexpr int64_t bytes(int64_t groups) { return groups * kGroupBytes<K> + groups / 8 * kPairBytes<K>; }
  // Group g of the panel, from group `group` of a record, vector v.
  KT_INLINE static void decode(const uint8_t* record, int group, int v, uint8_t* panel, int64_t g, int vector) {
    uint8_t* out = panel + bytes(g) + vector * kLanes * 4;
    I32 code[8];  // all of them before the first store, which might change the record for all that the compiler knows
    for_steps([&]<int S>() KT_ALWAYS_INLINE_LAMBDA { code[S] = D::template code<S>(record, group, v); });
    KT_UNROLL for (int s = 0; s < 8; s++)
      store_i(out + s * kPanelStep, code[s]);
    float* scales = reinterpret_cast<float*>(out + 8 * kPanelStep);
    KT_UNROLL for (int h = 0; h < K::kScales; h++, scales += kPV * kLanes)
      store(scales, D::scale(record, group, h, v));
    KT_UNROLL for (int m = 0; m < K::kMinima; m++, scales += kPV * kLanes)
      store(scales, D::minimum(record, group, m, v));
    if constexpr (K::kPairs > 0) {
      if (group != 7) return;
      for_steps<0, K::kPairs>([&]<int J>() KT_ALWAYS_INLINE_LAMBDA {
        store_i(scales + J * kPV * kLanes, D::template minimum_pair<J>(record, v));
      });
      store(scales + K::kPairs * kPV * kLanes, D::minus_dmin(record, v));
    }
  }
  template <int R>
  KT_INLINE static void tile(const uint8_t* x, const uint8_t* w, int64_t groups, const Tile& t) {
    tile_int8<K, R>(x, w, groups, t.c, t.accumulate, t.fetch);
  }
};

template <class D, class PANEL>
struct KernelInt8 {
  static constexpr int kWidth = kIntPanels * kPanelRows, kTileRows = PANEL::kTileRows;
  static constexpr int64_t panel_bytes(int64_t kc) {
    // K slice's panel, and room for its records where plain rows are packed first
    return PANEL::bytes(padded_groups<D>(kc)) + ceil_div(kc, Records<D>::kK) * D::kRecordBytes;
  }

  const Problem& p;
  const Plan& plan;
  Records<D> records;

  void fill(int64_t n, int64_t k, int64_t kc, void* panel) const {
    const int64_t groups = padded_groups<D>(kc);
    uint8_t* out = static_cast<uint8_t*>(panel);
    for (int i = 0; i < kIntPanels; i++) {
      // Past N there may be no panel: decode the last one again, its columns are never stored.
      const int64_t row = n + i * kPanelRows < p.n ? n + i * kPanelRows : n;
      const uint8_t* record = records.get(row, k, kc, out + PANEL::bytes(groups));
      for (int64_t g = 0; g < groups; g++) {
        KT_UNROLL for (int v = 0; v < kPanelVectors; v++)
          PANEL::decode(record + g / D::kGroups * D::kRecordBytes, static_cast<int>(g % D::kGroups), v, out, g,
                        i * kPanelVectors + v);
      }
    }
  }
  NextSlice next(int64_t n, int64_t k, int64_t kc) const { return records.next(n, k, kc, kIntPanels); }

  void tile(const Tile& t) const {
    const uint8_t* x = static_cast<const uint8_t*>(t.x) + record_offset<D>(p.m, t.row, t.k, t.kc);
    const uint8_t* w = static_cast<const uint8_t*>(t.panel);
    const int64_t groups = padded_groups<D>(t.kc);
    with_rows<kTileRows>(t.rows, [&]<int R>() { PANEL::template tile<R>(x, w, groups, t); });
  }
};

template <class D, class PANEL>
KT_INLINE void plan_int8(Plan& plan, const Problem& p, int threads) {
  constexpr int kK = Records<D>::kK;
  if (p.m <= kBlocking.direct_max) {
    plan.path = kDirect;
    plan.tiles = static_cast<int>(ceil_div(p.m, kDirectRows));
    plan.kc = static_cast<int>(plan.tiles == 1 && p.packed ? min_of<int64_t>(p.k, kDirectWhole)
                                                           : min_of<int64_t>(p.packed ? kDirectKC : kPlainKC, p.k));
    plan.block_panels = streams<KindOf<D>>(static_cast<int>(ceil_div(p.m, plan.tiles)), plan.tiles);
    plan.prepare_units = plan.tiles * ceil_div(p.k, kPrepareKC);
    plan.compute_units = panel_count(p.n);
    const int64_t slice_bytes = p.packed ? 0 : ceil_div(plan.kc, kK) * D::kRecordBytes;
    plan.scratch_bytes = plan.block_panels * (p.m * kPanelRows * 4 + slice_bytes);
  } else {
    plan.path = kInt8;
    // int16 codes: half as many, or the panel leaves L1.
    plan_gemm<KernelInt8<D, PANEL>>(plan, p, threads, kBlocking.int_kc * 32 / KindOf<D>::kXBytes, kK,
                                    kBlocking.int_block_panels);
  }
  plan.activation_bytes = record_offset<D>(p.m, 0, p.k + kK, 0);
}

}  // namespace ktlinear::tinyblas::KT_TIER
