// What the operators share: borrowed views of PyTorch tensors, their checks, and error messages.
//
// Everything goes through the C shim of the LibTorch stable ABI. The wrapper classes of torch/csrc/stable cost a shared
// pointer per tensor and a dispatcher call per allocation; a linear layer of 64 x 64 takes less time than that.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tinyblas/formats.h"

namespace ktlinear::ops {

// Python sees a RuntimeError with exactly this text. (STD_TORCH_CHECK would put a function and a file name before it.)
template <class... Parts>
[[noreturn]] void fail(const char* op, const Parts&... parts) {
  std::ostringstream text;
  text << "kt::" << op << ": ";
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

// Owns one tensor.
class Handle {
 public:
  Handle() = default;
  explicit Handle(AtenTensorHandle tensor) : tensor_(tensor) {}
  Handle(Handle&& other) noexcept : tensor_(std::exchange(other.tensor_, nullptr)) {}
  Handle& operator=(Handle&& other) noexcept {
    std::swap(tensor_, other.tensor_);
    return *this;
  }
  ~Handle() {
    if (tensor_ != nullptr) aoti_torch_delete_tensor_object(tensor_);
  }
  AtenTensorHandle get() const { return tensor_; }
  AtenTensorHandle release() { return std::exchange(tensor_, nullptr); }

 private:
  AtenTensorHandle tensor_ = nullptr;
};

// A tensor's data and geometry, borrowed.
struct View {
  AtenTensorHandle tensor;
  void* data;
  int64_t dim;
  const int64_t* sizes;
  const int64_t* strides;
  int32_t dtype;

  int64_t last() const { return sizes[dim - 1]; }
  int64_t rows() const;  // product of all dimensions but the last
  // Whether row i, counted over all dimensions but the last, is contiguous and starts at i * *step elements.
  bool one_row_step(int64_t* step) const;
  std::string shape() const;
};

// Checks that the tensor is dense and on the CPU.
View view(const char* op, const char* argument, AtenTensorHandle tensor);

int32_t dtype_uint8();
std::string dtype_name(int32_t dtype);
// F32, F16 or BF16, if the tensor's dtype is one of them.
std::optional<tinyblas::Type> float_type(int32_t dtype);
// The same, an error otherwise.
tinyblas::Type require_float(const char* op, const char* argument, int32_t dtype);
int32_t dtype_of(tinyblas::Type float_type);

// An unknown id is an error that lists the known ones.
const tinyblas::FormatInfo& format(const char* op, int64_t weight_type);
// The same for the packed layout.
const tinyblas::FormatInfo& packed_format(const char* op, int64_t weight_type);

// A weight as rows, one after another or `ldw` bytes apart.
struct Rows {
  const void* data;
  int64_t ldw;  // bytes
  int64_t n, k;
  const tinyblas::FormatInfo* format;
  int64_t expert_stride;  // bytes from one expert's n rows to the next one's; 0 where there are no experts
  Handle copy;            // holds the data where the tensor given could not be used in place
};
// weight [..., K] of a float dtype, or uint8 [..., row_bytes] with weight_type: all its rows.
Rows rows(const char* op, const View& weight, std::optional<int64_t> weight_type);
// The same with one more dimension in front, [E, N, K]: the N rows of each expert.
Rows expert_rows(const char* op, const View& weight, std::optional<int64_t> weight_type);
// input [..., K] against a weight's K; [prefix]N, K is the shape that the error asks for.
void check_in_features(const char* op, const View& input, const View& weight, const Rows& rows,
                       const char* prefix = "");

// The panels of a packed weight alone do not say it: padded to whole records, K = 32 and K = 64 have the same bytes.
void check_packed_input(const char* op, const View& input, int64_t k);
// Checks a packed weight's shape against uint8 [..., panels, panel_bytes], with `leading` dimensions in front.
void check_packed(const char* op, const View& weight, const tinyblas::FormatInfo& format, int64_t n, int64_t k,
                  int64_t leading = 0);

constexpr int kMaxDims = 64;  // as many as PyTorch's own iterators take

// A new, contiguous CPU tensor: like's leading dimensions, then `last`.
Handle empty_like_rows(const View& like, int64_t last, int32_t dtype);
Handle empty(int64_t dim, const int64_t* sizes, int32_t dtype);
Handle contiguous_copy(const View& source);
void* data(const Handle& tensor);
// The data of a contiguous tensor, copied only if it is not contiguous or not aligned yet.
const void* contiguous_data(const View& source, Handle& copy, int64_t alignment = 1);

// int64 or int32 indices of any shape.
class Indices {
 public:
  Indices(const char* op, const char* argument, const Handle& tensor);
  const View& view() const { return view_; }
  int64_t count() const { return count_; }
  int64_t operator[](int64_t at) const {
    return wide_ ? static_cast<const int64_t*>(values_)[at] : static_cast<const int32_t*>(values_)[at];
  }
  // An index outside [0, n) is an IndexError in Python, as F.embedding raises. what: n's meaning.
  void check_below(int64_t n, const char* what) const;

 private:
  const char *op_, *argument_;
  View view_;
  Handle copy_;
  const void* values_;
  bool wide_;
  int64_t count_;
};

// A cache line: PyTorch allocates so, and so do we; a view into another tensor or a mapped file may begin elsewhere.
constexpr int64_t kPackedAlignment = 64;

// StableIValue -> argument. Each takes over what the stack owned.
inline Handle tensor_argument(StableIValue value) { return Handle(torch::stable::detail::to<AtenTensorHandle>(value)); }
inline Handle optional_tensor_argument(StableIValue value) {
  return Handle(torch::stable::detail::to<std::optional<AtenTensorHandle>>(value).value_or(nullptr));
}
inline std::vector<Handle> tensor_list_argument(StableIValue value) {
  std::vector<Handle> handles;
  for (AtenTensorHandle tensor : torch::stable::detail::to<std::vector<AtenTensorHandle>>(value))
    handles.emplace_back(tensor);
  return handles;
}
inline StableIValue result(Handle tensor) { return torch::stable::detail::from(tensor.release()); }

// The operators, boxed: they take their arguments from the stack and leave the result there.
using Boxed = void(StableIValue* stack, uint64_t num_args, uint64_t num_outputs);
Boxed linear, linear_packed, linear_packed_group, linear_experts, linear_experts_packed, pack, pack_out, unpack,
    quantize, dequantize, embedding, embedding_packed, rms_norm, rotary;
Boxed set_exact, isa, available_isas, use_isa, limit;

}  // namespace ktlinear::ops
