// Floats <-> GGUF rows.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "common.h"
#include "decode.h"

namespace ktlinear::ops {

using tinyblas::Codec;
using tinyblas::FormatInfo;
using tinyblas::Type;

namespace {

// No type's scale is larger than its block's largest weight, so up to here no fp16 scale overflows.
constexpr float kLargestWeight = 65504.f;

int64_t bytes_of(Type float_type, int64_t count) {
  return tinyblas::row_bytes(*tinyblas::find_format(static_cast<int64_t>(float_type)), count);
}

std::string quantizable_types() {
  std::string names;
  for (const FormatInfo& f : tinyblas::kFormats)
    if (tinyblas::can_quantize(f.type)) names += (names.empty() ? "" : ", ") + std::string(f.name);
  return names;
}

// Calls f(first element, count) for pieces of a row that fit a buffer on the stack.
template <class F>
void pieces(int64_t k, const F& f) {
  for (int64_t i = 0; i < k; i += kDecodeElements) f(i, std::min(kDecodeElements, k - i));
}

}  // namespace

void decode_row(const Codec& codec, const FormatInfo& format, const void* row, int64_t k, Type out_type, void* out) {
  if (format.type == out_type) {
    std::memcpy(out, row, static_cast<size_t>(bytes_of(out_type, k)));
    return;
  }
  pieces(k, [&](int64_t first, int64_t count) {
    alignas(64) float buffer[kDecodeElements];
    const char* in = static_cast<const char*>(row) + tinyblas::row_bytes(format, first);
    char* to = static_cast<char*>(out) + bytes_of(out_type, first);
    float* wide = out_type == Type::F32 ? reinterpret_cast<float*>(to) : buffer;
    if (tinyblas::is_float(format.type))
      codec.widen(in, format.type, count, wide);
    else
      codec.dequantize(format.type, in, count / format.block, wide);
    if (out_type != Type::F32) codec.convert(wide, count, out_type, to);
  });
}

bool encode_row(const Codec& codec, const void* in, Type in_type, int64_t k, const FormatInfo& format, void* row) {
  if (format.type == in_type) {
    std::memcpy(row, in, static_cast<size_t>(bytes_of(in_type, k)));
    return true;
  }
  bool fits = true;
  pieces(k, [&](int64_t first, int64_t count) {
    alignas(64) float buffer[kDecodeElements];
    const char* from = static_cast<const char*>(in) + bytes_of(in_type, first);
    char* to = static_cast<char*>(row) + tinyblas::row_bytes(format, first);
    const float* wide = reinterpret_cast<const float*>(from);
    if (in_type != Type::F32) {
      codec.widen(from, in_type, count, buffer);
      wide = buffer;
    }
    if (tinyblas::is_float(format.type)) {
      codec.convert(wide, count, format.type, to);
    } else {
      for (int64_t i = 0; i < count; ++i) fits &= std::fabs(wide[i]) <= kLargestWeight;  // false for NaN
      if (fits) codec.quantize(format.type, wide, count / format.block, to);
    }
  });
  return fits;
}

void quantize(StableIValue* stack, uint64_t, uint64_t) {
  const char* op = "quantize";
  const Handle weight = tensor_argument(stack[0]);
  const Handle importance = optional_tensor_argument(stack[2]);
  const FormatInfo& f = format(op, torch::stable::detail::to<int64_t>(stack[1]));
  const View w = view(op, "weight", weight.get());
  const Type in_type = require_float(op, "weight", w.dtype);
  if (!tinyblas::can_quantize(f.type))
    fail(op, "weight_type is ", f.name, ", for which there is no quantizer yet; expected one of ", quantizable_types());
  if (w.dim < 1) fail(op, "weight has no dimensions; expected [..., in_features]");
  const int64_t k = w.last(), n = w.rows();
  if (k % f.block != 0)
    fail(op, "weight has shape ", w.shape(), "; its last dimension, in_features, has to be a multiple of ", f.block,
         " for weight_type ", f.name);
  // No type of the table has a quantizer that weighs by importance yet.
  if (importance.get() != nullptr) fail(op, "importance is given; expected None for weight_type ", f.name);
  Handle copy;
  const char* in = static_cast<const char*>(contiguous_data(w, copy));
  const int64_t in_row = bytes_of(in_type, k), out_row = tinyblas::row_bytes(f, k);
  Handle out = empty_like_rows(w, out_row, dtype_uint8());
  char* to = static_cast<char*>(data(out));
  const Codec& codec = *tier().codec;
  std::atomic<int64_t> unfit{-1};
  split_bytes(n, in_row, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      if (!encode_row(codec, in + row * in_row, in_type, k, f, to + row * out_row)) unfit = row;
  });
  if (unfit >= 0)
    fail(op, "weight holds NaN, infinity or a magnitude above ", kLargestWeight, " in row ", unfit.load(),
         "; expected finite values that ", f.name, "'s fp16 scales can hold");
  stack[0] = result(std::move(out));
}

void dequantize(StableIValue* stack, uint64_t, uint64_t) {
  const char* op = "dequantize";
  const Handle weight = tensor_argument(stack[0]);
  const int32_t dtype = torch::stable::detail::to<int32_t>(stack[2]);
  const Type out_type = require_float(op, "the result", dtype);
  const View w = view(op, "weight", weight.get());
  const Rows r = rows(op, w, torch::stable::detail::to<int64_t>(stack[1]));
  Handle out = empty_like_rows(w, r.k, dtype);
  char* to = static_cast<char*>(data(out));
  const int64_t out_row = bytes_of(out_type, r.k);
  const Codec& codec = *tier().codec;
  split_bytes(r.n, out_row, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      decode_row(codec, *r.format, static_cast<const char*>(r.data) + row * r.ldw, r.k, out_type, to + row * out_row);
  });
  stack[0] = result(std::move(out));
}

}  // namespace ktlinear::ops
