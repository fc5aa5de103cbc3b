// The operators' schemas and where they are registered.
#include "common.h"

namespace {

using namespace ktlinear::ops;
using torch::stable::detail::StableLibrary;

void register_kernels(StableLibrary& m) {
  m.impl("linear", &linear);
  m.impl("_linear", &linear);
  m.impl("linear_packed", &linear_packed);
  m.impl("_linear_packed", &linear_packed);
  m.impl("_linear_packed_group", &linear_packed_group);
  m.impl("linear_experts", &linear_experts);
  m.impl("_linear_experts", &linear_experts);
  m.impl("linear_experts_packed", &linear_experts_packed);
  m.impl("_linear_experts_packed", &linear_experts_packed);
  m.impl("pack", &pack);
  m.impl("_pack_out", &pack_out);
  m.impl("unpack", &unpack);
  m.impl("quantize", &quantize);
  m.impl("dequantize", &dequantize);
  m.impl("embedding", &embedding);
  m.impl("embedding_packed", &embedding_packed);
  m.impl("_rms_norm", &rms_norm);
  m.impl("_rotary", &rotary);
}

}  // namespace

STABLE_TORCH_LIBRARY(kt, m) {
  m.def("linear(Tensor input, Tensor weight, Tensor? bias=None, int? weight_type=None) -> Tensor");
  m.def(
      "linear_packed(Tensor input, Tensor weight, Tensor? bias, int out_features, int in_features, int weight_type) "
      "-> Tensor");
  // The same without autograd: the layer that PyTorch puts before an op with Python autograd costs more than a small
  // linear.
  m.def("_linear(Tensor input, Tensor weight, Tensor? bias=None, int? weight_type=None) -> Tensor");
  m.def(
      "_linear_packed(Tensor input, Tensor weight, Tensor? bias, int out_features, int in_features, int weight_type) "
      "-> Tensor");
  // Several weights of one type on one input: what q, k and v are.
  m.def(
      "_linear_packed_group(Tensor input, Tensor[] weights, Tensor[] biases, int[] out_features, int in_features, "
      "int weight_type) -> Tensor[]");
  for (const std::string name : {"linear_experts", "_linear_experts"}) {
    m.def((name + "(Tensor input, Tensor weight, Tensor expert_ids, int? weight_type=None) -> Tensor").c_str());
    m.def((name + "_packed(Tensor input, Tensor weight, Tensor expert_ids, int out_features, int in_features, "
                  "int weight_type) -> Tensor")
              .c_str());
  }
  m.def("pack(Tensor weight, int weight_type) -> Tensor");
  m.def("_pack_out(Tensor(a!) out, Tensor weight, int weight_type) -> ()");
  m.def("unpack(Tensor weight, int out_features, int in_features, int weight_type) -> Tensor");
  m.def("quantize(Tensor weight, int weight_type, Tensor? importance=None) -> Tensor");
  m.def("dequantize(Tensor weight, int weight_type, ScalarType dtype) -> Tensor");
  m.def("embedding(Tensor indices, Tensor weight, int weight_type, ScalarType dtype) -> Tensor");
  m.def(
      "embedding_packed(Tensor indices, Tensor weight, int num_embeddings, int embedding_dim, int weight_type, "
      "ScalarType dtype) -> Tensor");
  // Without gradients: ktlinear/_norm.py and _fuse.py call them where none are wanted.
  m.def("_rms_norm(Tensor input, Tensor weight, float eps, float added) -> Tensor");
  m.def("_rotary(Tensor query, Tensor key, Tensor cos, Tensor sin) -> (Tensor, Tensor)");
  m.def("_set_exact(bool exact) -> bool");
  m.def("_isa() -> str");
  m.def("_available_isas() -> str");
  m.def("_use_isa(str name) -> ()");
  m.def("_limit(str kind, int iterations, Tensor? buffer) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(kt, CPU, m) { register_kernels(m); }

// For these the kernels only raise: their own check names the argument, where the dispatcher would only list backends.
STABLE_TORCH_LIBRARY_IMPL(kt, CUDA, m) { register_kernels(m); }
STABLE_TORCH_LIBRARY_IMPL(kt, SparseCPU, m) { register_kernels(m); }
STABLE_TORCH_LIBRARY_IMPL(kt, SparseCsrCPU, m) { register_kernels(m); }
STABLE_TORCH_LIBRARY_IMPL(kt, MkldnnCPU, m) { register_kernels(m); }
STABLE_TORCH_LIBRARY_IMPL(kt, QuantizedCPU, m) { register_kernels(m); }

// Without a tensor among the arguments there is no backend to dispatch on.
STABLE_TORCH_LIBRARY_IMPL(kt, CompositeExplicitAutograd, m) {
  m.impl("_set_exact", &set_exact);
  m.impl("_isa", &isa);
  m.impl("_available_isas", &available_isas);
  m.impl("_use_isa", &use_isa);
  m.impl("_limit", &limit);
}
