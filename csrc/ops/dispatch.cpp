#include "dispatch.h"

#include <string>

#include "common.h"
#include "tinyblas/tiers.h"

namespace ktlinear::ops {

using tinyblas::Tier;

namespace {

// Until the loader has chosen, the last row: the one that asks least of the CPU.
std::atomic<const Tier*> g_tier{[] {
  int count;
  const Tier* all = tinyblas::tiers(&count);
  return all + (count - 1);
}()};
thread_local bool t_exact = false;  // of the calling thread; Problem::exact carries it to the pool's

std::string tier_names() {
  int count;
  const Tier* all = tinyblas::tiers(&count);
  std::string names;
  for (int i = 0; i < count; ++i) {
    if (i != 0) names += ',';
    names += all[i].name;
  }
  return names;
}

}  // namespace

const Tier& tier() { return *g_tier.load(std::memory_order_relaxed); }
bool exact() { return t_exact; }

void set_exact(StableIValue* stack, uint64_t, uint64_t) {
  const bool previous = t_exact;
  t_exact = torch::stable::detail::to<bool>(stack[0]);
  stack[0] = torch::stable::detail::from(previous);
}

void isa(StableIValue* stack, uint64_t, uint64_t) { stack[0] = torch::stable::detail::from(std::string(tier().name)); }

void available_isas(StableIValue* stack, uint64_t, uint64_t) { stack[0] = torch::stable::detail::from(tier_names()); }

void use_isa(StableIValue* stack, uint64_t, uint64_t) {
  const auto name = torch::stable::detail::to<std::string>(stack[0]);
  int count;
  const Tier* all = tinyblas::tiers(&count);
  for (int i = 0; i < count; ++i) {
    if (name == all[i].name) {
      g_tier.store(all + i);
      return;
    }
  }
  fail("_use_isa", "name is '", name, "'; compiled in are ", tier_names());
}

void limit(StableIValue* stack, uint64_t, uint64_t) {
  const Handle buffer = optional_tensor_argument(stack[2]);
  const auto kind = torch::stable::detail::to<std::string>(stack[0]);
  const auto iterations = torch::stable::detail::to<int64_t>(stack[1]);
  if (iterations < 1) fail("_limit", "iterations is ", iterations, "; expected 1 or more");
  const tinyblas::Limits& limits = *tier().limits;
  std::atomic<int64_t> total{0};
  if (kind == "fma" || kind == "bf16" || kind == "dot") {
    const auto run = kind == "fma" ? limits.fma : kind == "bf16" ? limits.bf16 : limits.dot;
    const int threads = pool_threads();
    split(threads, threads, false, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) total += run(iterations);
    });
  } else if (kind == "read") {
    if (buffer.get() == nullptr) fail("_limit", "buffer is None; kind 'read' expects a tensor");
    const View v = view("_limit", "buffer", buffer.get());
    Handle copy;
    const char* bytes = static_cast<const char*>(contiguous_data(v, copy));
    int64_t count;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_numel(v.tensor, &count));
    constexpr int64_t kLine = 64;
    const int64_t lines = count * static_cast<int64_t>(aoti_torch_dtype_element_size(v.dtype)) / kLine;
    static std::atomic<int64_t> sink;  // the sum has to be used, or the reads could be left out
    for (int64_t i = 0; i < iterations; ++i) {
      split(lines, pool_threads(), false, [&](int64_t begin, int64_t end) {
        sink += limits.read(bytes + begin * kLine, (end - begin) * kLine);
        total += (end - begin) * kLine;
      });
    }
  } else {
    fail("_limit", "kind is '", kind, "'; expected 'fma', 'bf16', 'dot' or 'read'");
  }
  stack[0] = torch::stable::detail::from(total.load());
}

}  // namespace ktlinear::ops
