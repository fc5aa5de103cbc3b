// Floats <-> GGUF rows.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

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

namespace {

// Importance as the quantizers take it: fp32, one weight for each element of a row.
struct Importance {
  const float* data = nullptr;
  int64_t row_stride = 0;  // 0: the same for all rows
  Handle copy;
};

Importance check_importance(const char* op, AtenTensorHandle tensor, const View& weight, const FormatInfo& f) {
  Importance importance;
  if (tensor == nullptr) {
    if (tinyblas::needs_importance(f.type))
      fail(op, "importance is None; expected one for weight_type ", f.name,
           ", as of an importance matrix (ones weigh all in_features alike)");
    return importance;
  }
  const View v = view(op, "importance", tensor);
  if (float_type(v.dtype) != Type::F32) fail(op, "importance has dtype ", dtype_name(v.dtype), "; expected float32");
  const bool per_element = v.dim == weight.dim && std::equal(v.sizes, v.sizes + v.dim, weight.sizes);
  if (!per_element && (v.dim != 1 || v.last() != weight.last()))
    fail(op, "importance has shape ", v.shape(), "; expected [", weight.last(),
         "], one weight per in_feature, or weight's ", weight.shape());
  importance.row_stride = per_element ? weight.last() : 0;
  importance.data = static_cast<const float*>(contiguous_data(v, importance.copy, alignof(float)));
  return importance;
}

// The row's importance, scaled by a power of two that keeps sums of products in range. False for NaN, infinity or a
// negative weight.
bool scale_importance(const float* in, int64_t k, std::vector<float>& out) {
  float largest = 0;
  bool fits = true;
  for (int64_t i = 0; i < k; ++i) {
    fits &= in[i] >= 0 && in[i] <= std::numeric_limits<float>::max();
    largest = std::max(largest, in[i]);
  }
  if (!fits) return false;
  int exponent = 0;
  std::frexp(largest, &exponent);
  const float factor = std::ldexp(1.f, std::clamp(-exponent, -126, 126));
  out.resize(static_cast<size_t>(k));
  for (int64_t i = 0; i < k; ++i) out[static_cast<size_t>(i)] = in[i] * factor;
  return true;
}

}  // namespace

void quantize(StableIValue* stack, uint64_t, uint64_t) {
  const char* op = "quantize";
  const Handle weight = tensor_argument(stack[0]);
  const Handle importance_tensor = optional_tensor_argument(stack[2]);
  const FormatInfo& f = format(op, torch::stable::detail::to<int64_t>(stack[1]));
  const View w = view(op, "weight", weight.get());
  const Type in_type = require_float(op, "weight", w.dtype);
  if (w.dim < 1) fail(op, "weight has no dimensions; expected [..., in_features]");
  const int64_t k = w.last(), n = w.rows();
  if (k % f.block != 0)
    fail(op, "weight has shape ", w.shape(), "; its last dimension, in_features, has to be a multiple of ", f.block,
         " for weight_type ", f.name);
  const Importance importance = check_importance(op, importance_tensor.get(), w, f);
  Handle copy;
  const char* in = static_cast<const char*>(contiguous_data(w, copy, bytes_of(in_type, 1)));
  const int64_t in_row = bytes_of(in_type, k), out_row = tinyblas::row_bytes(f, k);
  Handle out = empty_like_rows(w, out_row, dtype_uint8());
  char* to = static_cast<char*>(data(out));
  const Codec& codec = *tier().codec;
  const auto quantize_row = tier().quantize;
  std::atomic<int64_t> unfit_weight{-1}, unfit_importance{-1};
  split_bytes(n, in_row, [&](int64_t begin, int64_t end) {
    std::vector<float> wide, weights;
    for (int64_t row = begin; row < end; ++row) {
      // Before float types part, which ignore the values: an unfit one is an error whatever the type.
      if (importance.data != nullptr && (row == begin || importance.row_stride != 0) &&
          !scale_importance(importance.data + row * importance.row_stride, k, weights)) {
        unfit_importance = row;
        return;
      }
      const char* from = in + row * in_row;
      if (f.type == in_type) {
        std::memcpy(to + row * out_row, from, static_cast<size_t>(in_row));
        continue;
      }
      const float* x = reinterpret_cast<const float*>(from);
      if (in_type != Type::F32) {
        wide.resize(static_cast<size_t>(k));
        codec.widen(from, in_type, k, wide.data());
        x = wide.data();
      }
      if (tinyblas::is_float(f.type)) {
        codec.convert(x, k, f.type, to + row * out_row);
        continue;
      }
      bool fits = true;
      for (int64_t i = 0; i < k; ++i) fits &= std::fabs(x[i]) <= kLargestWeight;  // false for NaN
      if (!fits) {
        unfit_weight = row;
        return;
      }
      quantize_row(f.type, x, k, importance.data == nullptr ? nullptr : weights.data(), to + row * out_row);
    }
  });
  if (unfit_weight >= 0)
    fail(op, "weight holds NaN, infinity or a magnitude above ", kLargestWeight, " in row ", unfit_weight.load(),
         "; expected finite values that ", f.name, "'s fp16 scales can hold");
  if (unfit_importance >= 0)
    fail(op, "importance holds NaN, infinity or a negative value (row ", unfit_importance.load(),
         " of weight); expected finite weights that are not negative");
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
