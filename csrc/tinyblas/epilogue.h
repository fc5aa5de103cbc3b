// The one place where sums become outputs: bias added once in fp32, one rounding to the output type.
#pragma once

#include "scalar.h"

namespace ktlinear::tinyblas::KT_TIER {

KT_INLINE F32 load_float(const void* p, Type t, int64_t i) {
  if (t == Type::F32) return load(static_cast<const float*>(p) + i);
  const uint16_t* h = static_cast<const uint16_t*>(p) + i;
  return t == Type::F16 ? load_f16(h) : load_bf16(h);
}
KT_INLINE void store_float(void* p, Type t, int64_t i, F32 v) {
  if (t == Type::F32) return store(static_cast<float*>(p) + i, v);
  uint16_t* h = static_cast<uint16_t*>(p) + i;
  t == Type::F16 ? store_f16(h, v) : store_bf16(h, v);
}

// Element (row, col) of x and of y. Rows of x are gathered, and those of y scattered, where they are read and written
// anyway.
KT_INLINE int64_t x_index(const Problem& p, int64_t row, int64_t col) {
  return (p.x_rows ? p.x_rows[row] : row) * p.ldx + col;
}
KT_INLINE int64_t y_index(const Problem& p, int64_t row, int64_t col) {
  return (p.y_rows ? p.y_rows[row] : row) * p.ldy + col;
}

// y[row][col .. col + count) = c[0 .. count) + bias. WIDTH: the usual count, for which the loop unrolls; others take
// the tail loop.
template <int WIDTH>
KT_NOINLINE void store_outputs(const Problem& p, int64_t row, int64_t col, const float* c, int64_t count) {
  const int64_t y = y_index(p, row, col);
  auto vector = [&](int64_t i) KT_ALWAYS_INLINE_LAMBDA {
    F32 v = load(c + i);
    if (p.bias) v = add(v, load_float(p.bias, p.bias_type, col + i));
    store_float(p.y, p.y_type, y + i, v);
  };
  if (count == WIDTH && p.y_type == Type::F32 && !p.bias) {
    std::memcpy(static_cast<float*>(p.y) + y, c, WIDTH * sizeof(float));  // a constant: vector moves
    return;
  }
  int64_t i = 0;
  if constexpr (WIDTH >= kLanes)
    for (; i + kLanes <= count; i += kLanes) vector(i);
  for (; i < count; i++) {
    float v = c[i];
    if (p.bias) v += load_element(p.bias, p.bias_type, col + i);
    store_element(p.y, p.y_type, y + i, v);
  }
}

// Claims the lines of y that a tile will store to; without it the stores of a short K cost a quarter of the time.
template <int WIDTH>
KT_NOINLINE void prefetch_outputs(const Problem& p, int64_t row, int64_t rows, int64_t col) {
  const int64_t bytes = element_bytes(p.y_type);
  for (int64_t r = 0; r < rows; r++) {
    const char* y = static_cast<const char*>(p.y) + y_index(p, row + r, col) * bytes;
    for (int64_t b = 0; b < WIDTH * bytes; b += 64) prefetch_write(y + b);
  }
}

}  // namespace ktlinear::tinyblas::KT_TIER
