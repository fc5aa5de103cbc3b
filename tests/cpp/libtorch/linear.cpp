// kt::linear in a LibTorch program without Python. Usage: linear LIBRARY TIER
// Prints the tier; the exit status says whether the values are right.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <dlfcn.h>

#include <cstdio>

template <class Function>
static auto op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Function>();
}

int main(int, char** argv) {
  if (dlopen(argv[1], RTLD_NOW) == nullptr) return std::printf("%s\n", dlerror()), 2;
  // In Python the loader compares the CPU with the tiers of the library and chooses; here that is the program's part.
  op<void(c10::string_view)>("kt::_use_isa").call(argv[2]);
  std::printf("%s\n", op<std::string()>("kt::_isa").call().c_str());

  const auto linear =
      op<at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, std::optional<int64_t>)>(
          "kt::linear");
  const auto quantize = op<at::Tensor(const at::Tensor&, int64_t, const std::optional<at::Tensor>&)>("kt::quantize");
  at::manual_seed(0);
  const at::Tensor x = at::randn({3, 96}), w = at::randn({21, 96}), bias = at::randn({21});
  const at::Tensor expected = at::linear(x.to(at::kDouble), w.to(at::kDouble), bias.to(at::kDouble));
  const auto error = [&](const at::Tensor& y) { return (y.to(at::kDouble) - expected).abs().max().item<double>(); };

  const double exact = error(linear.call(x, w, bias, std::nullopt));
  // Q8_0 (8) rounds each of 96 weights and activations by less than 1 %.
  const double rounded = error(linear.call(x, quantize.call(w, 8, std::nullopt), bias, 8));
  std::printf("largest errors: %g, %g\n", exact, rounded);
  return exact < 1e-4 && rounded < 0.5 && rounded > 0 ? 0 : 1;
}
