// GGUF rows <-> the packed layout.
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
  if (weight.dim != 2) fail(op, "weight has shape ", weight.shape(), "; expected two dimensions, [N, row_bytes]");
  return rows(op, weight, weight_type);
}

void pack_rows(const Rows& r, void* packed) {
  const auto pack = tier().codec->pack;
  split_bytes(tinyblas::panel_count(r.n), tinyblas::panel_bytes(*r.format, r.k),
              [&](int64_t begin, int64_t end) { pack(r.format->type, r.data, r.ldw, r.n, r.k, packed, begin, end); });
}

}  // namespace

void pack(StableIValue* stack, uint64_t, uint64_t) {
  const char* op = "pack";
  const Handle weight = tensor_argument(stack[0]);
  const Rows r = quantized_rows(op, view(op, "weight", weight.get()), torch::stable::detail::to<int64_t>(stack[1]));
  const int64_t sizes[2] = {tinyblas::panel_count(r.n), tinyblas::panel_bytes(*r.format, r.k)};
  Handle out = empty(2, sizes, dtype_uint8());
  advise_huge_pages(data(out), sizes[0] * sizes[1]);
  pack_rows(r, data(out));
  stack[0] = result(std::move(out));
}

void pack_out(StableIValue* stack, uint64_t, uint64_t) {
  const char* op = "_pack_out";
  const Handle out = tensor_argument(stack[0]), weight = tensor_argument(stack[1]);
  const Rows r = quantized_rows(op, view(op, "weight", weight.get()), torch::stable::detail::to<int64_t>(stack[2]));
  const View o = view(op, "out", out.get());
  const int64_t panels = tinyblas::panel_count(r.n), bytes = tinyblas::panel_bytes(*r.format, r.k);
  bool contiguous;
  TORCH_ERROR_CODE_CHECK(aoti_torch_is_contiguous(out.get(), &contiguous));
  if (o.dtype != dtype_uint8() || o.dim != 2 || o.sizes[0] != panels || o.sizes[1] != bytes || !contiguous ||
      reinterpret_cast<uintptr_t>(o.data) % kPackedAlignment != 0)
    fail(op, "out is ", dtype_name(o.dtype), " ", o.shape(), contiguous ? "" : ", not contiguous",
         "; expected contiguous uint8 [", panels, ", ", bytes, "], ", kPackedAlignment, "-byte aligned");
  pack_rows(r, o.data);
}

void unpack(StableIValue* stack, uint64_t, uint64_t) {
  const char* op = "unpack";
  const Handle weight = tensor_argument(stack[0]);
  const auto n = torch::stable::detail::to<int64_t>(stack[1]), k = torch::stable::detail::to<int64_t>(stack[2]);
  const FormatInfo& f = packed_format(op, torch::stable::detail::to<int64_t>(stack[3]));
  const View w = view(op, "weight", weight.get());
  check_packed(op, w, f, n, k);
  Handle copy;
  const void* packed = contiguous_data(w, copy, kPackedAlignment);
  const int64_t sizes[2] = {n, tinyblas::row_bytes(f, k)};
  Handle out = empty(2, sizes, dtype_uint8());
  void* out_rows = data(out);
  const auto unpack = tier().codec->unpack;
  split_bytes(tinyblas::panel_count(n), tinyblas::panel_bytes(f, k),
              [&](int64_t begin, int64_t end) { unpack(f.type, packed, n, k, out_rows, begin, end); });
  stack[0] = result(std::move(out));
}

}  // namespace ktlinear::ops
