// What the tests of the kernels without PyTorch share.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "tinyblas/tiers.h"

using namespace ktlinear::tinyblas;

namespace {

[[maybe_unused]] std::mt19937 random_bits(7);

// `bytes` of memory that begin `offset` bytes after a multiple of 64 and end where the allocation does.
class Exact {
 public:
  explicit Exact(int64_t bytes, int64_t offset = 0) : base_(nullptr, std::free), bytes_(bytes) {
    void* base;
    if (posix_memalign(&base, 64, static_cast<size_t>(bytes + offset)) != 0) std::abort();
    base_.reset(static_cast<char*>(base));
    data_ = base_.get() + offset;
  }
  void randomize() {
    for (int64_t i = 0; i < bytes_; i++) data_[i] = static_cast<char>(random_bits());
  }
  void fill(int value) { std::memset(data_, value, static_cast<size_t>(bytes_)); }
  template <class T = void>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }
  bool operator==(const Exact& other) const {
    return bytes_ == other.bytes_ && std::memcmp(data_, other.data_, static_cast<size_t>(bytes_)) == 0;
  }

 private:
  std::unique_ptr<char, void (*)(void*)> base_;
  char* data_;
  int64_t bytes_;
};

// Computes p into a new y: units in order, or one by one from the last to the first with a scratch of its own each.
inline Exact compute(const Kernels& kernels, Problem p, bool one_by_one) {
  const int64_t element = p.y_type == Type::F32 ? 4 : 2;
  Exact y(((p.m - 1) * p.ldy + p.n) * element);
  y.fill(0x55);
  p.y = y.as();
  const Plan plan = kernels.plan(p, one_by_one ? 3 : 1);
  Exact activations(plan.activation_bytes);
  activations.fill(0xFF);  // NaN: what prepare leaves unwritten must not count
  bool fits = true;
  for (int64_t i = 0; i < plan.prepare_units && one_by_one; i++)
    fits &= kernels.prepare(p, plan, activations.as(), plan.prepare_units - 1 - i, plan.prepare_units - i);
  if (!one_by_one) fits = kernels.prepare(p, plan, activations.as(), 0, plan.prepare_units);
  if (!fits) {
    p.exact = true;
    return compute(kernels, p, one_by_one);
  }
  for (int64_t i = 0; i < (one_by_one ? plan.compute_units : 1); i++) {
    Exact scratch(plan.scratch_bytes);
    scratch.fill(0xFF);
    const int64_t last = plan.compute_units - i;
    kernels.compute(p, plan, activations.as(), scratch.as(), one_by_one ? last - 1 : 0, last);
  }
  return y;
}

inline void store_float(const Exact& x, Type type, int64_t i, float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, 4);
  if (type == Type::F32)
    x.as<uint32_t>()[i] = bits;
  else if (type == Type::BF16)
    x.as<uint16_t>()[i] = static_cast<uint16_t>(bits >> 16);
  else  // fp16 of a value between 2^-14 and 2^15, cut; NaN and infinity as they are
    x.as<uint16_t>()[i] = static_cast<uint16_t>(
        (bits >> 16 & 0x8000) |
        ((bits & 0x7FFFFFFF) >= 0x7F800000 ? 0x7C00 | (bits >> 13 & 0x3FF) : (bits - 0x38000000) >> 13 & 0x7FFF));
}

}  // namespace
