// A program that has only what `cmake --install` gives: y = x * W^T with fp32 and Q8_0 weights, each compared with sums
// in double over weights decoded here. Prints the tier; the exit status says whether the values are right.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "tinyblas/tiers.h"

using namespace ktlinear::tinyblas;

namespace {

struct Free {
  void operator()(void* p) const { std::free(p); }
};
using Memory = std::unique_ptr<void, Free>;

Memory allocate(int64_t bytes) {
  return Memory(std::aligned_alloc(64, static_cast<size_t>(ceil_div(std::max<int64_t>(bytes, 1), 64) * 64)));
}

void multiply(const Kernels& kernels, Problem p) {
  const Plan plan = kernels.plan(p, 1);
  const Memory activations = allocate(plan.activation_bytes), scratch = allocate(plan.scratch_bytes);
  if (!kernels.prepare(p, plan, activations.get(), 0, plan.prepare_units)) {
    p.exact = true;
    return multiply(kernels, p);
  }
  kernels.compute(p, plan, activations.get(), scratch.get(), 0, plan.compute_units);
}

bool is_product(const std::vector<float>& y, const std::vector<float>& x, const std::vector<float>& w, int64_t n,
                int64_t k) {
  for (size_t i = 0; i < y.size(); ++i) {
    const int64_t row = static_cast<int64_t>(i) / n, column = static_cast<int64_t>(i) % n;
    double sum = 0, size = 0;
    for (int64_t j = 0; j < k; ++j) {
      const double product = double(x[row * k + j]) * w[column * k + j];
      sum += product;
      size += product * product;
    }
    if (!(std::abs(y[i] - sum) <= 1e-5 * std::sqrt(size))) {
      std::printf("y[%d] is %g; expected %g\n", int(i), y[i], sum);
      return false;
    }
  }
  return true;
}

}  // namespace

int main() {
  int count;
  const Tier& tier = tiers(&count)[0];
  std::printf("%s\n", tier.name);
  constexpr int64_t m = 3, n = 21, k = 96;
  std::mt19937 random_bits(1);
  std::normal_distribution<float> normal;
  std::vector<float> x(m * k), w(n * k);
  for (float& v : x) v = normal(random_bits);
  for (float& v : w) v = normal(random_bits);

  Problem p{};
  p.m = m, p.n = n, p.k = k;
  p.x = x.data(), p.ldx = k;
  p.ldy = n;
  p.exact = true;
  std::vector<float> y(m * n, NAN);
  p.y = y.data();
  p.w = w.data(), p.ldw = k * 4, p.w_type = Type::F32;
  multiply(*tier.sgemm, p);
  if (!is_product(y, x, w, n, k)) return 1;

  const FormatInfo& f = *find_format(static_cast<int64_t>(Type::Q8_0));
  const int64_t row = row_bytes(f, k);
  std::vector<uint8_t> blocks(n * row);
  for (int64_t i = 0; i < n; ++i) tier.quantize(f.type, &w[i * k], k, nullptr, &blocks[i * row]);
  std::vector<float> decoded(n * k);
  for (int64_t i = 0; i < n * k; ++i) {  // a block: fp16 scale, 32 int8 codes
    const uint8_t* block = &blocks[i / 32 * 34];
    float d;
    tier.codec->widen(block, Type::F16, 1, &d);
    decoded[i] = d * static_cast<int8_t>(block[2 + i % 32]);
    if (std::abs(decoded[i] - w[i]) > 0.02f) return std::printf("w[%d] is not quantized\n", int(i)), 1;
  }
  p.w = blocks.data(), p.ldw = row, p.w_type = f.type;
  std::fill(y.begin(), y.end(), NAN);
  multiply(*tier.mixmul, p);
  return is_product(y, x, decoded, n, k) ? 0 : 1;
}
