// Rows of any weight type -> rows of a float type.
#pragma once

#include "dispatch.h"
#include "tinyblas/formats.h"

namespace ktlinear::ops {

// A multiple of every block; its fp32 form stays in the L1 cache between the two steps.
constexpr int64_t kDecodeElements = 2048;

// k elements of one row of `format` -> out, of a float type.
void decode_row(const tinyblas::Codec& codec, const tinyblas::FormatInfo& format, const void* row, int64_t k,
                tinyblas::Type out_type, void* out);

}  // namespace ktlinear::ops
