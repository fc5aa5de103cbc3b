// Rows of a table by index, plain or packed.
#include <algorithm>

#include "common.h"
#include "decode.h"
#include "workspace.h"

namespace ktlinear::ops {

using tinyblas::Codec;
using tinyblas::FormatInfo;
using tinyblas::Type;

namespace {

// Calls decode(row, out) for every index, in parallel; all indices are checked before anything is read.
template <class Decode>
Handle gather(const char* op, const Handle& indices, int64_t n, int64_t k, int32_t dtype, const Decode& decode) {
  const Indices index(op, "indices", indices);
  const View& i = index.view();
  if (i.dim + 1 > kMaxDims) fail(op, "indices has ", i.dim, " dimensions; expected at most ", kMaxDims - 1);
  index.check_below(n, "rows");
  int64_t sizes[kMaxDims];
  std::copy_n(i.sizes, i.dim, sizes);
  sizes[i.dim] = k;
  Handle out = empty(i.dim + 1, sizes, dtype);
  char* to = static_cast<char*>(data(out));
  const int64_t row_size = k * static_cast<int64_t>(aoti_torch_dtype_element_size(dtype));
  split_bytes(index.count(), row_size, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; ++at) decode(index[at], to + at * row_size);
  });
  return out;
}

}  // namespace

void embedding(StableIValue* stack, uint64_t, uint64_t) {
  const char* op = "embedding";
  const Handle indices = tensor_argument(stack[0]), weight = tensor_argument(stack[1]);
  const int32_t dtype = torch::stable::detail::to<int32_t>(stack[3]);
  const Type out_type = require_float(op, "the result", dtype);
  const View w = view(op, "weight", weight.get());
  if (w.dim != 2) fail(op, "weight has shape ", w.shape(), "; expected two dimensions, [N, row_bytes]");
  const Rows r = rows(op, w, torch::stable::detail::to<int64_t>(stack[2]));
  const Codec& codec = *tier().codec;
  stack[0] = result(gather(op, indices, r.n, r.k, dtype, [&](int64_t row, void* out) {
    decode_row(codec, *r.format, static_cast<const char*>(r.data) + row * r.ldw, r.k, out_type, out);
  }));
}

void embedding_packed(StableIValue* stack, uint64_t, uint64_t) {
  const char* op = "embedding_packed";
  const Handle indices = tensor_argument(stack[0]), weight = tensor_argument(stack[1]);
  const auto n = torch::stable::detail::to<int64_t>(stack[2]), k = torch::stable::detail::to<int64_t>(stack[3]);
  const FormatInfo& f = packed_format(op, torch::stable::detail::to<int64_t>(stack[4]));
  const int32_t dtype = torch::stable::detail::to<int32_t>(stack[5]);
  const Type out_type = require_float(op, "the result", dtype);
  const View w = view(op, "weight", weight.get());
  check_packed(op, w, f, n, k);
  Handle copy;
  const void* packed = contiguous_data(w, copy, kPackedAlignment);
  const Codec& codec = *tier().codec;
  stack[0] = result(gather(op, indices, n, k, dtype, [&](int64_t row, void* out) {
    if (out_type == Type::F32) return codec.dequantize_packed_row(f.type, packed, k, row, static_cast<float*>(out));
    Lease wide(scratch_buffer(), k * static_cast<int64_t>(sizeof(float)));
    float* floats = static_cast<float*>(wide.data());
    codec.dequantize_packed_row(f.type, packed, k, row, floats);
    codec.convert(floats, k, out_type, out);
  }));
}

}  // namespace ktlinear::ops
