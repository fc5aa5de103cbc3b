// The torch-free interface of the kernels: y[M, N] = x[M, K] * W[N, K]^T + bias.
//
// Nothing here allocates, starts a thread or throws. The caller owns the memory and the threads:
//
//     Plan plan = kernels.plan(problem, threads);
//     activations = plan.activation_bytes of 64-byte aligned memory, shared by all threads
//     prepare(problem, plan, activations, begin, end)       over any partition of [0, plan.prepare_units), any threads
//     -- barrier --
//     compute(problem, plan, activations, scratch, b, e)    over any partition of [0, plan.compute_units), any threads;
//                                                           scratch = plan.scratch_bytes, 64-byte aligned, one per thread
//
// The result's bits depend neither on the partition nor on the number of threads. Arguments are not validated here:
// every pointer, shape and type is checked once, in csrc/ops.
#pragma once

#include <cstddef>
#include <cstdint>

#include "formats.h"

namespace ktlinear::tinyblas {

struct Problem {
  int64_t m, n, k;  // m and n at least 1
  const void* x;    // [m][ldx], ldx in elements, F32 / F16 / BF16
  int64_t ldx;
  const int64_t* x_rows;  // [m]: which row of x row i reads, or nullptr: row i
  Type x_type;
  const void* w;  // packed: panels, one after another; else rows, ldw bytes apart
  int64_t ldw;
  Type w_type;
  bool packed;
  const void* bias;  // [n] of bias_type, or nullptr
  Type bias_type;
  void* y;  // [m][ldy], ldy in elements
  int64_t ldy;
  const int64_t* y_rows;  // [m]: which row of y row i is written to, or nullptr: row i
  Type y_type;
  bool exact;  // quantized weights only: decode to fp32, leave x as it is
};

struct Plan {
  int64_t activation_bytes;
  int64_t scratch_bytes;
  int64_t prepare_units;
  int64_t compute_units;
  bool dynamic;  // true: hand units out one by one (prefill); false: one contiguous range a thread (decode)
  // Filled and read by the kernels only.
  int path, tile_rows, tiles, kc, block_panels, m_splits;
};

struct Kernels {
  Plan (*plan)(const Problem&, int threads);
  // False: some |x| is finite but too large for the int8 mode (above 2^100): nothing is lost, call again with exact =
  // true.
  bool (*prepare)(const Problem&, const Plan&, void* activations, int64_t begin, int64_t end);
  void (*compute)(const Problem&, const Plan&, const void* activations, void* scratch, int64_t begin, int64_t end);
};

// Conversions of quantized weights, by panels of 16 rows (n rows, k elements; the last panel may be short).
struct Codec {
  // GGUF rows (ldw bytes apart) [16 * begin, min(n, 16 * end)) -> packed panels [begin, end), and back.
  void (*pack)(Type, const void* rows, int64_t ldw, int64_t n, int64_t k, void* packed, int64_t begin, int64_t end);
  void (*unpack)(Type, const void* packed, int64_t n, int64_t k, void* rows, int64_t begin, int64_t end);
  // `count` consecutive GGUF blocks -> fp32.
  void (*dequantize)(Type, const void* blocks, int64_t count, float* out);
  // Row `row` of a packed matrix -> k floats.
  void (*dequantize_packed_row)(Type, const void* packed, int64_t k, int64_t row, float* out);
  // fp32 <-> out type (F32 / F16 / BF16), round to nearest even.
  void (*convert)(const float* in, int64_t count, Type out_type, void* out);
  void (*widen)(const void* in, Type in_type, int64_t count, float* out);
};

// k floats -> one GGUF row: as the `gguf` package does, bit for bit; by a search where that has no quantizer, or with
// an importance: k weights of the squared errors, finite and not negative, or nullptr.
using Quantize = void(Type, const float* row, int64_t k, const float* importance, void* blocks);

// What the machine can do with this tier's own instructions; run by the benchmarks on every thread at once.
struct Limits {
  int64_t (*fma)(int64_t iterations);   // runs, returns the floating-point operations done
  int64_t (*bf16)(int64_t iterations);  // the same for bf16 products summed in fp32 (0: no instruction for them)
  int64_t (*dot)(int64_t iterations);   // runs the tier's int8 dot product (0: it has none), returns operations
  int64_t (*read)(const void* p, int64_t bytes);  // reads once in order, returns a value that depends on the data
};

struct Tier {
  const char* name;
  const Kernels* sgemm;   // float weights
  const Kernels* mixmul;  // quantized weights
  const Codec* codec;
  Quantize* quantize;
  const Limits* limits;
};

}  // namespace ktlinear::tinyblas
