// The tier in use and the thread pool.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <cstdint>

#include "tinyblas/tinyblas.h"

namespace ktlinear::ops {

const tinyblas::Tier& tier();
// Decode quantized weights to fp32 and leave the activations as they are (`with ktlinear.exact()`).
bool exact();

inline int pool_threads() { return static_cast<int>(torch::stable::get_num_threads()); }

// Calls f(begin, end) over a partition of [0, units), on PyTorch's own pool: contiguous ranges, or (dynamic) units
// handed out one by one to at most `threads`. Right whatever number of threads the pool grants.
template <class F>
void split(int64_t units, int threads, bool dynamic, const F& f) {
  if (units <= 0) return;
  if (threads <= 1 || units == 1) {
    f(int64_t{0}, units);
  } else if (dynamic) {
    std::atomic<int64_t> next{0};
    torch::stable::parallel_for(0, threads < units ? threads : units, 1, [&](int64_t, int64_t) {
      for (int64_t unit; (unit = next.fetch_add(1, std::memory_order_relaxed)) < units;) f(unit, unit + 1);
    });
  } else {
    torch::stable::parallel_for(0, units, 1, f);
  }
}

// The same for conversions: `cost` bytes a unit, serial where the whole is smaller than a parallel region is worth.
template <class F>
void split_bytes(int64_t units, int64_t cost, const F& f) {
  constexpr int64_t kSerialBytes = 64 << 10;
  split(units, units * cost < kSerialBytes ? 1 : pool_threads(), false, f);
}

}  // namespace ktlinear::ops
