// RMS norm and rotary embedding in one call each: what a decoder computes between its linear layers. At one token they
// are a few hundred multiplications, and what PyTorch's composition of them costs is the 8 and the 16 operator calls.
#include <cmath>

#include "common.h"
#include "dispatch.h"

namespace ktlinear::ops {

namespace {

void require_fp32(const char* op, const char* argument, const View& v) {
  if (float_type(v.dtype) != tinyblas::Type::F32)
    fail(op, argument, " has dtype ", dtype_name(v.dtype), "; expected float32");
}

const float* floats(const View& v, Handle& copy) { return static_cast<const float*>(contiguous_data(v, copy)); }

// y = x / sqrt(mean(x^2) + eps) * (weight + added)
void rms_norm_row(const float* x, const float* weight, int64_t k, float eps, float added, float* y) {
  constexpr int kSums = 16;  // one alone would wait for itself
  float sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums <= k; i += kSums)
    for (int j = 0; j < kSums; ++j) sums[j] += x[i + j] * x[i + j];
  for (; i < k; ++i) sums[0] += x[i] * x[i];
  for (int step = kSums / 2; step > 0; step /= 2)
    for (int j = 0; j < step; ++j) sums[j] += sums[j + step];
  const float scale = 1.f / std::sqrt(sums[0] / static_cast<float>(k) + eps);
  for (i = 0; i < k; ++i) y[i] = x[i] * scale * (weight[i] + added);
}

// y = x * cos + rotate_half(x) * sin, rounded after each of the three as PyTorch's own operators do.
void rotate_row(const float* x, const float* cos, const float* sin, int64_t d, float* y) {
  const int64_t half = d / 2;
  for (int64_t i = 0; i < half; ++i) y[i] = x[i] * cos[i] + -x[i + half] * sin[i];
  for (int64_t i = half; i < d; ++i) y[i] = x[i] * cos[i] + x[i - half] * sin[i];
}

// cos or sin, [1 or B, S, D].
struct Angles {
  const float* data;
  int64_t batch_step;  // floats; 0: one for all
  Handle copy;
};

Angles angles(const char* op, const char* argument, const Handle& tensor, const View& query) {
  const View v = view(op, argument, tensor.get());
  require_fp32(op, argument, v);
  const int64_t b = query.sizes[0], s = query.sizes[2], d = query.sizes[3];
  if (v.dim != 3 || (v.sizes[0] != 1 && v.sizes[0] != b) || v.sizes[1] != s || v.sizes[2] != d)
    fail(op, argument, " has shape ", v.shape(), "; expected [1 or ", b, ", ", s, ", ", d, "]");
  Angles a{};
  a.data = floats(v, a.copy);
  a.batch_step = v.sizes[0] == 1 ? 0 : s * d;
  return a;
}

Handle rotate(const View& x, const Angles& cos, const Angles& sin) {
  const int64_t b = x.sizes[0], h = x.sizes[1], s = x.sizes[2], d = x.sizes[3];
  Handle copy, out = empty(4, x.sizes, x.dtype);
  const float* from = static_cast<const float*>(x.data);
  int64_t step[3] = {x.strides[0], x.strides[1], x.strides[2]};
  if (x.strides[3] != 1 && d > 1) {
    from = floats(x, copy);
    step[0] = h * s * d;
    step[1] = s * d;
    step[2] = d;
  }
  float* to = static_cast<float*>(data(out));
  split_bytes(b * h * s, d * static_cast<int64_t>(sizeof(float)), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t bi = row / (h * s), hi = row / s % h, si = row % s;
      rotate_row(from + bi * step[0] + hi * step[1] + si * step[2], cos.data + bi * cos.batch_step + si * d,
                 sin.data + bi * sin.batch_step + si * d, d, to + row * d);
    }
  });
  return out;
}

View heads(const char* op, const char* argument, const Handle& tensor) {
  const View v = view(op, argument, tensor.get());
  require_fp32(op, argument, v);
  if (v.dim != 4 || v.last() % 2 != 0)
    fail(op, argument, " has shape ", v.shape(), "; expected [batch, heads, tokens, an even head_dim]");
  return v;
}

}  // namespace

void rms_norm(StableIValue* stack, uint64_t, uint64_t) {
  const char* op = "rms_norm";
  const Handle input = tensor_argument(stack[0]), weight = tensor_argument(stack[1]);
  const auto eps = static_cast<float>(torch::stable::detail::to<double>(stack[2]));
  const auto added = static_cast<float>(torch::stable::detail::to<double>(stack[3]));
  const View x = view(op, "input", input.get()), w = view(op, "weight", weight.get());
  require_fp32(op, "input", x);
  require_fp32(op, "weight", w);
  if (x.dim < 1) fail(op, "input has no dimensions; expected [..., K]");
  const int64_t k = x.last();
  if (w.dim != 1 || w.sizes[0] != k) fail(op, "weight has shape ", w.shape(), "; expected [", k, "]");
  Handle x_copy, w_copy;
  int64_t step = k;
  const float* from = static_cast<const float*>(x.data);
  if (!x.one_row_step(&step)) {
    from = floats(x, x_copy);
    step = k;
  }
  const float* scales = floats(w, w_copy);
  Handle y = empty_like_rows(x, k, x.dtype);
  float* to = static_cast<float*>(data(y));
  split_bytes(x.rows(), k * static_cast<int64_t>(sizeof(float)), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) rms_norm_row(from + row * step, scales, k, eps, added, to + row * k);
  });
  stack[0] = result(std::move(y));
}

void rotary(StableIValue* stack, uint64_t, uint64_t) {
  const char* op = "rotary";
  const Handle query = tensor_argument(stack[0]), key = tensor_argument(stack[1]);
  const Handle cos = tensor_argument(stack[2]), sin = tensor_argument(stack[3]);
  const View q = heads(op, "query", query), k = heads(op, "key", key);
  if (k.sizes[0] != q.sizes[0] || k.sizes[2] != q.sizes[2] || k.sizes[3] != q.sizes[3])
    fail(op, "key has shape ", k.shape(), "; expected the batch, tokens and head_dim of query's ", q.shape());
  const Angles c = angles(op, "cos", cos, q), s = angles(op, "sin", sin, q);
  stack[0] = result(rotate(q, c, s));
  stack[1] = result(rotate(k, c, s));
}

}  // namespace ktlinear::ops
