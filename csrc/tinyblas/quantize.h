// Floats -> GGUF rows: the tier's Quantize function. Compiled for one tier of each vector width, which serves those
// above.
#pragma once

#include "formats_list.h"
#include "quantize/codebook.h"
#include "quantize/grids.h"
#include "quantize/k_quants.h"

namespace ktlinear::tinyblas::KT_TIER {

template <Type T>
static void quantize_as(const float* x, int64_t k, const float* importance, uint8_t* out) {
  constexpr FormatInfo format = *find_format(static_cast<int64_t>(T));
  constexpr int64_t chunk_bytes = kChunk / format.block * format.block_bytes;
  const float row_square = importance && format.block == 32 ? mean_square(x, k) : 0.f;
  int64_t i = 0;
  for (; i + kChunk <= k; i += kChunk, out += chunk_bytes)
    Quantizer<T>::chunk({x + i, importance ? importance + i : nullptr, row_square}, out);
  if (const size_t rest = static_cast<size_t>(k - i)) {
    float elements[kChunk] = {}, weights[kChunk] = {};
    uint8_t blocks[chunk_bytes];
    std::memcpy(elements, x + i, rest * sizeof(float));
    if (importance) std::memcpy(weights, importance + i, rest * sizeof(float));
    Quantizer<T>::chunk({elements, importance ? weights : nullptr, row_square}, blocks);
    std::memcpy(out, blocks, rest / format.block * format.block_bytes);
  }
}

extern void quantize(Type type, const float* x, int64_t k, const float* importance, void* blocks) {
  switch (type) {
#define KT_CASE(name) \
  case Type::name:    \
    return quantize_as<Type::name>(x, k, importance, static_cast<uint8_t*>(blocks));
    KT_FORMATS(KT_CASE)
#undef KT_CASE
    default:
      __builtin_unreachable();  // csrc/ops lets only types of the table through
  }
}

}  // namespace ktlinear::tinyblas::KT_TIER
