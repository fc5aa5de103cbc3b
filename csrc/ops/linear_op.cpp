// y[M, N] = x[M, K] * W[N, K]^T + bias: checks, allocates, splits the work over PyTorch's pool and calls the kernels.
#include <algorithm>
#include <array>
#include <cstring>
#include <span>
#include <vector>

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

// Problems of one x and one weight type share the prepared activations, which do not depend on N, and a parallel
// region.
using Problems = std::span<Problem>;
constexpr size_t kMostProblems = 8;

void multiply_chunk(const Kernels& kernels, Problems problems, int threads) {
  std::array<Plan, kMostProblems> plans;
  int64_t units = 0, scratch_bytes = 0;
  for (size_t i = 0; i < problems.size(); ++i) {
    plans[i] = kernels.plan(problems[i], threads);
    units += plans[i].compute_units;
    scratch_bytes = std::max(scratch_bytes, plans[i].scratch_bytes);
  }
  const Problem& first = problems[0];
  Lease activations(activation_buffer(), plans[0].activation_bytes);
  std::atomic<bool> fits{true};
  split(plans[0].prepare_units, prepare_threads(first.m * first.k, threads), false, [&](int64_t begin, int64_t end) {
    if (!kernels.prepare(first, plans[0], activations.data(), begin, end)) fits = false;
  });
  if (!fits) {
    for (Problem& problem : problems) problem.exact = true;
    return multiply_chunk(kernels, problems, threads);
  }
  split(units, threads, plans[0].dynamic, [&](int64_t begin, int64_t end) {
    Lease scratch(scratch_buffer(), scratch_bytes);
    for (size_t i = 0; i < problems.size() && end > 0; ++i) {
      const int64_t count = plans[i].compute_units;
      if (begin < count)
        kernels.compute(problems[i], plans[i], activations.data(), scratch.data(), begin, std::min(end, count));
      begin = std::max<int64_t>(begin - count, 0);
      end -= count;
    }
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

void multiply(Problems whole) {
  const Problem& first = whole[0];
  int64_t n = 0;
  for (const Problem& p : whole) n += p.n;
  if (first.m == 0 || n == 0) return;
  if (first.k == 0) {
    for (const Problem& p : whole) fill_with_bias(p);
    return;
  }
  const Kernels& kernels = kernels_for(first.w_type);
  const int threads = compute_threads(first.w_type, first.m * n * first.k);
  const int64_t height = chunk_rows(first.m);
  for (int64_t begin = 0; begin < first.m; begin += height) {
    std::array<Problem, kMostProblems> copies;
    const auto last =
        std::copy_if(whole.begin(), whole.end(), copies.begin(), [](const Problem& p) { return p.n > 0; });
    const Problems chunk(copies.begin(), last);
    for (Problem& p : chunk) {
      p.m = std::min(height, p.m - begin);
      p.x = static_cast<const char*>(p.x) + begin * p.ldx * element_size(p.x_type);
      p.y = static_cast<char*>(p.y) + begin * p.ldy * element_size(p.y_type);
    }
    multiply_chunk(kernels, chunk, threads);
  }
}

// Checks input, and makes the output of the problem.
Handle set_input(const char* op, const View& x, Problem& p, Handle& copy) {
  p.x_type = require_float(op, "input", x.dtype);
  p.y_type = p.x_type;
  p.m = x.rows();
  p.x = x.data;
  if (!x.one_row_step(&p.ldx)) {
    p.x = copy.get() == nullptr ? contiguous_data(x, copy) : data(copy);
    p.ldx = p.k;
  }
  p.exact = exact();
  Handle y = empty_like_rows(x, p.n, x.dtype);
  p.y = data(y);
  p.ldy = p.n;
  return y;
}

void set_bias(const char* op, const Handle& bias, Problem& p, Handle& copy) {
  if (bias.get() == nullptr) return;
  const View b = view(op, "bias", bias.get());
  p.bias_type = require_float(op, "bias", b.dtype);
  if (b.dim != 1 || b.sizes[0] != p.n) fail(op, "bias has shape ", b.shape(), "; expected [", p.n, "]");
  p.bias = contiguous_data(b, copy);
}

void set_packed_weight(const char* op, const View& x, const Handle& weight, const FormatInfo& f, int64_t n, int64_t k,
                       Problem& p, Handle& copy) {
  const View w = view(op, "weight", weight.get());
  check_packed_input(op, x, k);
  check_packed(op, w, f, n, k);
  p.n = n;
  p.k = k;
  p.w = contiguous_data(w, copy, kPackedAlignment);
  p.w_type = f.type;
  p.packed = true;
}

// Everything but the weight: checks input and bias against N and K, makes the output, multiplies.
Handle multiply(const char* op, const View& x, const Handle& bias, Problem& p) {
  Handle x_copy, bias_copy;
  Handle y = set_input(op, x, p, x_copy);
  set_bias(op, bias, p, bias_copy);
  multiply(Problems(&p, 1));
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
  Problem p = problem_of(r);
  stack[0] = result(multiply(op, x, bias, p));
}

void linear_packed(StableIValue* stack, uint64_t, uint64_t) {
  const char* op = "linear_packed";
  const Handle input = tensor_argument(stack[0]), weight = tensor_argument(stack[1]);
  const Handle bias = optional_tensor_argument(stack[2]);
  const auto n = torch::stable::detail::to<int64_t>(stack[3]), k = torch::stable::detail::to<int64_t>(stack[4]);
  const FormatInfo& f = packed_format(op, torch::stable::detail::to<int64_t>(stack[5]));

  const View x = input_view(op, input);
  Problem p{};
  Handle copy;
  set_packed_weight(op, x, weight, f, n, k, p, copy);
  stack[0] = result(multiply(op, x, bias, p));
}

void linear_packed_group(StableIValue* stack, uint64_t, uint64_t) {
  const char* op = "linear_packed_group";
  const Handle input = tensor_argument(stack[0]);
  const std::vector<Handle> weights = tensor_list_argument(stack[1]), biases = tensor_list_argument(stack[2]);
  const auto n = torch::stable::detail::to<std::vector<int64_t>>(stack[3]);
  const auto k = torch::stable::detail::to<int64_t>(stack[4]);
  const FormatInfo& f = packed_format(op, torch::stable::detail::to<int64_t>(stack[5]));
  const size_t count = weights.size();
  if (count < 1 || count > kMostProblems) fail(op, "weights has ", count, " tensors; expected 1 to ", kMostProblems);
  if (n.size() != count)
    fail(op, "out_features has ", n.size(), " numbers; expected one for each of ", count, " weights");
  if (!biases.empty() && biases.size() != count)
    fail(op, "biases has ", biases.size(), " tensors; expected none or one for each of ", count, " weights");

  const View x = input_view(op, input);
  std::array<Problem, kMostProblems> problems{};
  std::array<Handle, kMostProblems> weight_copies, bias_copies;
  std::vector<AtenTensorHandle> outputs;
  std::array<Handle, kMostProblems> y;
  Handle x_copy;
  for (size_t i = 0; i < count; ++i) {
    Problem& p = problems[i];
    set_packed_weight(op, x, weights[i], f, n[i], k, p, weight_copies[i]);
    y[i] = set_input(op, x, p, x_copy);
    if (!biases.empty()) set_bias(op, biases[i], p, bias_copies[i]);
  }
  multiply(Problems(problems).first(count));
  for (size_t i = 0; i < count; ++i) outputs.push_back(y[i].release());
  stack[0] = torch::stable::detail::from(outputs);
}

}  // namespace ktlinear::ops
