// y[M, N] = x[M, K] * W[N, K]^T + bias: checks, allocates, splits the work over PyTorch's pool and calls the kernels.
#include <algorithm>
#include <cstring>

#include "common.h"
#include "multiply.h"
#include "workspace.h"

namespace ktlinear::ops {

using tinyblas::FormatInfo;
using tinyblas::Kernels;
using tinyblas::Plan;
using tinyblas::Problem;
using tinyblas::Type;

namespace {

void multiply_chunk(const Kernels& kernels, const Problem& problem, int threads) {
  const Plan plan = kernels.plan(problem, threads);
  Lease activations(activation_buffer(), plan.activation_bytes);
  std::atomic<bool> fits{true};
  split(plan.prepare_units, prepare_threads(problem.m * problem.k, threads), false, [&](int64_t begin, int64_t end) {
    if (!kernels.prepare(problem, plan, activations.data(), begin, end)) fits = false;
  });
  if (!fits) {
    Problem decoded = problem;
    decoded.exact = true;
    return multiply_chunk(kernels, decoded, threads);
  }
  split(plan.compute_units, threads, plan.dynamic, [&](int64_t begin, int64_t end) {
    Lease scratch(scratch_buffer(), plan.scratch_bytes);
    kernels.compute(problem, plan, activations.data(), scratch.data(), begin, end);
  });
}

// K = 0: the bias alone. Row 0 is converted, the others are copies of it.
void fill_with_bias(const Problem& p) {
  const int64_t row = p.n * element_size(p.y_type);
  char* y = static_cast<char*>(p.y);
  if (p.bias == nullptr) {
    std::memset(y, 0, static_cast<size_t>(p.m * row));
    return;
  }
  Lease wide(activation_buffer(), p.n * static_cast<int64_t>(sizeof(float)));
  float* bias = static_cast<float*>(wide.data());
  tier().codec->widen(p.bias, p.bias_type, p.n, bias);
  tier().codec->convert(bias, p.n, p.y_type, y);
  for (int64_t i = 1; i < p.m; ++i) std::memcpy(y + i * row, y, static_cast<size_t>(row));
}

void multiply(const Problem& whole) {
  if (whole.m == 0 || whole.n == 0) return;
  if (whole.k == 0) return fill_with_bias(whole);
  const Kernels& kernels = kernels_for(whole.w_type);
  const int threads = compute_threads(whole.w_type, whole.m * whole.n * whole.k);
  const int64_t height = chunk_rows(whole.m);
  for (int64_t begin = 0; begin < whole.m; begin += height) {
    Problem chunk = whole;
    chunk.m = std::min(height, whole.m - begin);
    chunk.x = static_cast<const char*>(whole.x) + begin * whole.ldx * element_size(whole.x_type);
    chunk.y = static_cast<char*>(whole.y) + begin * whole.ldy * element_size(whole.y_type);
    multiply_chunk(kernels, chunk, threads);
  }
}

// Everything but the weight: checks input and bias against N and K, makes the output, multiplies.
Handle multiply(const char* op, const View& x, const Handle& bias, Problem& p) {
  p.x_type = require_float(op, "input", x.dtype);
  p.y_type = p.x_type;
  p.m = x.rows();

  Handle x_copy, bias_copy;
  p.x = x.data;
  if (!x.one_row_step(&p.ldx)) {
    p.x = contiguous_data(x, x_copy);
    p.ldx = p.k;
  }
  if (bias.get() != nullptr) {
    const View b = view(op, "bias", bias.get());
    p.bias_type = require_float(op, "bias", b.dtype);
    if (b.dim != 1 || b.sizes[0] != p.n) fail(op, "bias has shape ", b.shape(), "; expected [", p.n, "]");
    p.bias = contiguous_data(b, bias_copy);
  }
  Handle y = empty_like_rows(x, p.n, x.dtype);
  p.y = data(y);
  p.ldy = p.n;
  p.exact = exact();
  multiply(p);
  return y;
}

View input_view(const char* op, const Handle& input) {
  const View x = view(op, "input", input.get());
  if (x.dim < 1) fail(op, "input has no dimensions; expected [..., in_features]");
  return x;
}

}  // namespace

void linear(StableIValue* stack, uint64_t, uint64_t) {
  const char* op = "linear";
  const Handle input = tensor_argument(stack[0]), weight = tensor_argument(stack[1]);
  const Handle bias = optional_tensor_argument(stack[2]);
  const auto weight_type = torch::stable::detail::to<std::optional<int64_t>>(stack[3]);

  const View x = input_view(op, input);
  const View w = view(op, "weight", weight.get());
  if (w.dim != 2) fail(op, "weight has shape ", w.shape(), "; expected two dimensions, [out_features, in_features]");
  const Rows r = rows(op, w, weight_type);
  check_in_features(op, x, w, r);
  Problem p{};
  p.n = r.n;
  p.k = r.k;
  p.w = r.data;
  p.ldw = r.ldw;
  p.w_type = r.format->type;
  stack[0] = result(multiply(op, x, bias, p));
}

void linear_packed(StableIValue* stack, uint64_t, uint64_t) {
  const char* op = "linear_packed";
  const Handle input = tensor_argument(stack[0]), weight = tensor_argument(stack[1]);
  const Handle bias = optional_tensor_argument(stack[2]);
  const auto n = torch::stable::detail::to<int64_t>(stack[3]), k = torch::stable::detail::to<int64_t>(stack[4]);
  const FormatInfo& f = packed_format(op, torch::stable::detail::to<int64_t>(stack[5]));

  const View x = input_view(op, input);
  const View w = view(op, "weight", weight.get());
  check_packed_input(op, x, k);
  check_packed(op, w, f, n, k);
  Problem p{};
  p.n = n;
  p.k = k;
  Handle copy;
  p.w = contiguous_data(w, copy, kPackedAlignment);
  p.w_type = f.type;
  p.packed = true;
  stack[0] = result(multiply(op, x, bias, p));
}

}  // namespace ktlinear::ops
