// What the operators that multiply by a weight share: which kernels, how many rows at a time, how many threads.
#pragma once

#include "common.h"
#include "dispatch.h"

namespace ktlinear::ops {

inline int element_size(tinyblas::Type float_type) { return float_type == tinyblas::Type::F32 ? 4 : 2; }

inline const tinyblas::Kernels& kernels_for(tinyblas::Type weight) {
  return *(tinyblas::is_float(weight) ? tier().sgemm : tier().mixmul);
}

// The weight's part of a problem.
inline tinyblas::Problem problem_of(const Rows& r) {
  tinyblas::Problem p{};
  p.n = r.n;
  p.k = r.k;
  p.w = r.data;
  p.ldw = r.ldw;
  p.w_type = r.format->type;
  return p;
}

// Rows of x per pass over the weights, for M rows in all: bounds the activation workspace. Larger chunks gain nothing,
// since a pass over W is paid for by 512 rows already. Chunks of equal height, so that M = 513 is not 512 rows and then
// a whole pass for a single one.
inline int64_t chunk_rows(int64_t m) {
  constexpr int64_t kMost = 512;
  const int64_t chunks = tinyblas::ceil_div(m, kMost);
  return tinyblas::ceil_div(tinyblas::ceil_div(m, chunks), 16) * 16;
}

// A parallel region costs some microseconds: with no more multiplications (M * N * K) than these one thread is done
// sooner. Quantized weights are a quarter of the bytes.
inline int compute_threads(tinyblas::Type weight, int64_t multiplications) {
  constexpr int64_t kSerialFloat = int64_t{1} << 17, kSerialQuantized = int64_t{1} << 18;
  return multiplications <= (tinyblas::is_float(weight) ? kSerialFloat : kSerialQuantized) ? 1 : pool_threads();
}

// Quantizing fewer activations than this (M * K) takes less than a parallel region.
inline int prepare_threads(int64_t activations, int threads) {
  constexpr int64_t kSerial = int64_t{1} << 14;
  return activations > kSerial ? threads : 1;
}

}  // namespace ktlinear::ops
