// The GEMM driver, one for all: x packed by tiles of rows, W turned slice by slice of K into panels, by a Kernel that
// knows how.
//
//   panel      the Kernel's own layout, kWidth rows of W by kc of K      (L1)
//   C          for each panel of the block, each tile: [tile rows][kWidth] fp32   (L2; the sums of earlier K slices)
//
// Loops: block of panels -> K slice -> panel -> tile. A slice of x is reused by all panels of the block while it is in
// L2, and a panel by all tiles while it is in L1. Every sum runs over K in order, slice by slice: its bits depend on
// nothing but kc.
//
// Kernel:  kWidth, kTileRows; panel_bytes(kc)
//          void fill(int64_t n, int64_t k, int64_t kc, void* panel)             W[n..n+kWidth)[k..k+kc) -> panel
//          void tile(const Tile&)                                               C[rows][kWidth] (+)= x tile * panel
//          NextSlice next(int64_t n, int64_t k, int64_t kc)                     what the tiles fetch into L2 meanwhile
#pragma once

#include "blocking.h"
#include "epilogue.h"

namespace ktlinear::tinyblas::KT_TIER {

// What the tiles of one panel fetch ahead: `count` streams of `bytes` each, `stride` apart.
struct NextSlice {
  const char* p;
  int64_t stride, bytes, count;
};

// A tile's share of it: whole streams, spread over the tile's steps of K.
struct Fetch {
  const char* p;
  int64_t stride;
  int count, bytes_per_32;  // of K
  template <int K>
  KT_INLINE void step() {
    for (int s = 0; s < count; s++)
      for (int b = 0; b < bytes_per_32 * K / 32; b += 64) prefetch_l2(p + s * stride + b);
    p += bytes_per_32 * K / 32;
  }
};

struct Tile {
  int rows;            // of x, 1..kTileRows
  int64_t columns;     // of W, 1..kWidth
  int64_t row, k, kc;  // first row of x, K slice
  int64_t index;       // of the tile
  const void* x;       // all of the packed x
  const void* panel;
  float* c;
  bool accumulate;
  Fetch fetch;
};

// `total` in even parts: 9 rows at MR = 8 are 5 + 4, not 8 + 1. One division for all: a tile is over in a thousand
// cycles.
struct Parts {
  int64_t size, longer;  // the first `longer` parts have one more
  KT_INLINE Parts(int64_t total, int64_t parts) : size(total / parts), longer(total % parts) {}
  KT_INLINE int64_t begin(int64_t i) const { return i * size + min_of(i, longer); }
  KT_INLINE int count(int64_t i) const { return static_cast<int>(size) + (i < longer); }
};

// kc: the wanted K slice; record: what slices are a multiple of.
template <class Kernel>
KT_INLINE void plan_gemm(Plan& plan, const Problem& p, int threads, int64_t kc, int64_t record, int block_panels) {
  // K in even slices of about kc, whole records each: 576 at kc = 512 is one slice, not 512 + 64.
  const int64_t slices = p.k < kc ? 1 : (p.k + kc / 2) / kc;
  plan.kc = static_cast<int>(min_of(ceil_div(ceil_div(p.k, slices), record) * record, p.k));
  plan.tiles = static_cast<int>(ceil_div(p.m, Kernel::kTileRows));
  const int64_t panels = ceil_div(p.n, Kernel::kWidth);
  // At least four blocks a thread; where N is too small for two, M is split as well.
  plan.block_panels = static_cast<int>(min_of<int64_t>(block_panels, ceil_div(panels, 4 * threads)));
  const int64_t blocks = ceil_div(panels, plan.block_panels);
  const int64_t wanted = 2 * threads;
  plan.m_splits = static_cast<int>(blocks >= wanted ? 1 : min_of<int64_t>(ceil_div(wanted, blocks), plan.tiles));
  plan.scratch_bytes =
      Kernel::panel_bytes(plan.kc) + int64_t{plan.block_panels} * plan.tiles * Kernel::kTileRows * Kernel::kWidth * 4;
  plan.prepare_units = plan.tiles;
  plan.compute_units = blocks * plan.m_splits;
  plan.dynamic = true;
}

template <class Kernel>
KT_INLINE void gemm(const Problem& p, const Plan& plan, const Kernel& kernel, const void* x, void* scratch,
                    int64_t begin, int64_t end) {
  char* panel = static_cast<char*>(scratch);
  float* c = reinterpret_cast<float*>(panel + Kernel::panel_bytes(plan.kc));
  const int64_t panels = ceil_div(p.n, Kernel::kWidth);
  const Parts rows(p.m, plan.tiles), splits(plan.tiles, plan.m_splits);
  for (int64_t unit = begin; unit < end; unit++) {
    const int64_t block = unit / plan.m_splits, split = unit % plan.m_splits;
    const int64_t p0 = block * plan.block_panels, p1 = min_of<int64_t>(panels, p0 + plan.block_panels);
    const int64_t t0 = splits.begin(split);
    const int tiles = splits.count(split);
    for (int64_t k = 0; k < p.k; k += plan.kc) {
      const int64_t kc = min_of<int64_t>(plan.kc, p.k - k);
      const bool last = k + kc == p.k;
      for (int64_t j = p0; j < p1; j++) {
        const int64_t n = j * Kernel::kWidth, columns = min_of<int64_t>(Kernel::kWidth, p.n - n);
        kernel.fill(n, k, kc, panel);
        const NextSlice next = j + 1 < p1 ? kernel.next(n + Kernel::kWidth, k, kc)
                               : !last
                                   ? kernel.next(p0 * Kernel::kWidth, k + kc, min_of<int64_t>(plan.kc, p.k - k - kc))
                                   : kernel.next(p1 * Kernel::kWidth, 0, plan.kc);
        const int bytes_per_32 = static_cast<int>(ceil_div(next.bytes * 32, kc));
        const Parts streams(next.count, tiles);
        for (int i = 0; i < tiles; i++) {
          const int64_t row = rows.begin(t0 + i);
          const int count = rows.count(t0 + i);
          float* tile = c + ((j - p0) * tiles + i) * Kernel::kTileRows * Kernel::kWidth;
          if (last) prefetch_outputs<Kernel::kWidth>(p, row, count, n);
          kernel.tile(Tile{count,
                           columns,
                           row,
                           k,
                           kc,
                           t0 + i,
                           x,
                           panel,
                           tile,
                           k > 0,
                           {next.p + streams.begin(i) * next.stride, next.stride, streams.count(i), bytes_per_32}});
          if (last)
            for (int r = 0; r < count; r++)
              store_outputs<Kernel::kWidth>(p, row + r, n, tile + r * Kernel::kWidth, columns);
        }
      }
    }
  }
}

}  // namespace ktlinear::tinyblas::KT_TIER
