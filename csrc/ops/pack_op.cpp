// GGUF rows <-> the packed layout, of a matrix or of one for each expert.
#include <algorithm>

#include "common.h"
#include "dispatch.h"
#include "workspace.h"

namespace ktlinear::ops {

using tinyblas::FormatInfo;

namespace {

Rows quantized_rows(const char* op, const View& weight, int64_t weight_type) {
  packed_format(op, weight_type);
  if (weight.dtype != dtype_uint8())
    fail(op, "weight has dtype ", dtype_name(weight.dtype), "; expected uint8 GGUF rows (see kt::quantize)");
  if (weight.dim != 2 && weight.dim != 3)
    fail(op, "weight has shape ", weight.shape(),
         "; expected two dimensions, [N, row_bytes], or three, [experts, N, row_bytes]");
  return rows(op, weight, weight_type);
}

// One matrix, or the first dimension's number of them.
int64_t matrices(const View& weight) { return weight.dim == 3 ? weight.sizes[0] : 1; }

// [rows, row_bytes] or [experts, rows, row_bytes] -> a tensor with the same first dimension.
Handle empty_matrices(const View& weight, int64_t rows, int64_t row_bytes) {
  const int64_t sizes[3] = {weight.sizes[0], rows, row_bytes};
  const int64_t skip = 3 - weight.dim;
  return empty(weight.dim, sizes + skip, dtype_uint8());
}

// Calls f(matrix, begin, end) for panels [begin, end) of `count` matrices of n rows, in parallel.
template <class F>
void each_panel(const FormatInfo& format, int64_t count, int64_t n, int64_t k, const F& f) {
  const int64_t panels = tinyblas::panel_count(n);
  split_bytes(count * panels, tinyblas::panel_bytes(format, k), [&](int64_t begin, int64_t end) {
    for (int64_t stop; begin < end; begin = stop) {
      const int64_t matrix = begin / panels, first = matrix * panels;
      stop = std::min(end, first + panels);
      f(matrix, begin - first, stop - first);
    }
  });
}

void pack_rows(const View& weight, const Rows& r, void* packed) {
  const auto pack = tier().codec->pack;
  const int64_t n = weight.sizes[weight.dim - 2];
  const int64_t bytes = tinyblas::panel_count(n) * tinyblas::panel_bytes(*r.format, r.k);
  each_panel(*r.format, matrices(weight), n, r.k, [&](int64_t matrix, int64_t begin, int64_t end) {
    pack(r.format->type, static_cast<const char*>(r.data) + matrix * n * r.ldw, r.ldw, n, r.k,
         static_cast<char*>(packed) + matrix * bytes, begin, end);
  });
}

}  // namespace

void pack(StableIValue* stack, uint64_t, uint64_t) {
  const char* op = "pack";
  const Handle weight = tensor_argument(stack[0]);
  const View w = view(op, "weight", weight.get());
  const Rows r = quantized_rows(op, w, torch::stable::detail::to<int64_t>(stack[1]));
  const int64_t panels = tinyblas::panel_count(w.sizes[w.dim - 2]), bytes = tinyblas::panel_bytes(*r.format, r.k);
  Handle out = empty_matrices(w, panels, bytes);
  advise_huge_pages(data(out), matrices(w) * panels * bytes);
  pack_rows(w, r, data(out));
  stack[0] = result(std::move(out));
}

void pack_out(StableIValue* stack, uint64_t, uint64_t) {
  const char* op = "_pack_out";
  const Handle out = tensor_argument(stack[0]), weight = tensor_argument(stack[1]);
  const View w = view(op, "weight", weight.get()), o = view(op, "out", out.get());
  const Rows r = quantized_rows(op, w, torch::stable::detail::to<int64_t>(stack[2]));
  const int64_t panels = tinyblas::panel_count(w.sizes[w.dim - 2]), bytes = tinyblas::panel_bytes(*r.format, r.k);
  bool contiguous;
  TORCH_ERROR_CODE_CHECK(aoti_torch_is_contiguous(out.get(), &contiguous));
  if (o.dtype != dtype_uint8() || o.dim != w.dim || matrices(o) != matrices(w) || o.sizes[o.dim - 2] != panels ||
      o.last() != bytes || !contiguous || reinterpret_cast<uintptr_t>(o.data) % kPackedAlignment != 0)
    fail(op, "out is ", dtype_name(o.dtype), " ", o.shape(), contiguous ? "" : ", not contiguous",
         "; expected contiguous uint8 [", w.dim == 3 ? std::to_string(w.sizes[0]) + ", " : "", panels, ", ", bytes,
         "], ", kPackedAlignment, "-byte aligned");
  pack_rows(w, r, o.data);
}

void unpack(StableIValue* stack, uint64_t, uint64_t) {
  const char* op = "unpack";
  const Handle weight = tensor_argument(stack[0]);
  const auto n = torch::stable::detail::to<int64_t>(stack[1]), k = torch::stable::detail::to<int64_t>(stack[2]);
  const FormatInfo& f = packed_format(op, torch::stable::detail::to<int64_t>(stack[3]));
  const View w = view(op, "weight", weight.get());
  check_packed(op, w, f, n, k, w.dim == 3);
  Handle copy;
  const char* packed = static_cast<const char*>(contiguous_data(w, copy, kPackedAlignment));
  Handle out = empty_matrices(w, n, tinyblas::row_bytes(f, k));
  char* out_rows = static_cast<char*>(data(out));
  const auto unpack = tier().codec->unpack;
  each_panel(f, matrices(w), n, k, [&](int64_t matrix, int64_t begin, int64_t end) {
    unpack(f.type, packed + matrix * w.sizes[w.dim - 2] * w.last(), n, k,
           out_rows + matrix * n * tinyblas::row_bytes(f, k), begin, end);
  });
  stack[0] = result(std::move(out));
}

}  // namespace ktlinear::ops
