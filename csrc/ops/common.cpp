#include "common.h"

namespace ktlinear::ops {

using tinyblas::FormatInfo;
using tinyblas::Type;

namespace {

std::string device_name(int32_t type) {
  if (type == aoti_torch_device_type_cpu()) return "cpu";
  if (type == aoti_torch_device_type_cuda()) return "cuda";
  if (type == aoti_torch_device_type_meta()) return "meta";
  return "device type " + std::to_string(type);
}

std::string known_types(bool packed) {
  std::string names;
  for (const FormatInfo& f : tinyblas::kFormats) {
    if (packed && f.packed_k == 0) continue;
    if (!names.empty()) names += ", ";
    names += f.name;
    names += " (" + std::to_string(static_cast<int>(f.type)) + ")";
  }
  return names;
}

bool is_contiguous(const View& v) {
  bool contiguous;
  TORCH_ERROR_CODE_CHECK(aoti_torch_is_contiguous(v.tensor, &contiguous));
  return contiguous;
}

}  // namespace

int64_t View::rows() const {
  int64_t count = 1;
  for (int64_t i = 0; i + 1 < dim; ++i) count *= sizes[i];
  return count;
}

bool View::one_row_step(int64_t* step) const {
  if (last() > 1 && strides[dim - 1] != 1) return false;
  *step = last();
  bool first = true;
  int64_t expected = 0;
  for (int64_t i = dim - 2; i >= 0; --i) {
    if (sizes[i] == 1) continue;
    if (first) {
      *step = strides[i];
      first = false;
    } else if (strides[i] != expected) {
      return false;
    }
    expected = strides[i] * sizes[i];
  }
  return true;
}

std::string View::shape() const {
  std::string text = "[";
  for (int64_t i = 0; i < dim; ++i) {
    if (i != 0) text += ", ";
    text += std::to_string(sizes[i]);
  }
  text += ']';
  return text;
}

View view(const char* op, const char* argument, AtenTensorHandle tensor) {
  static const int32_t cpu = aoti_torch_device_type_cpu();
  static const int32_t strided = aoti_torch_layout_strided();
  int32_t device, layout;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor, &device));
  if (device != cpu) fail(op, argument, " is on ", device_name(device), "; expected a tensor on cpu");
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_layout(tensor, &layout));
  if (layout != strided)
    fail(op, argument, " is sparse or has another special layout; expected a dense (strided) tensor");
  View v{};
  v.tensor = tensor;
  int64_t *sizes, *strides;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor, &v.dtype));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(tensor, &v.dim));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor, &sizes));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor, &strides));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(tensor, &v.data));
  if (v.dim > kMaxDims) fail(op, argument, " has ", v.dim, " dimensions; expected at most ", kMaxDims);
  v.sizes = sizes;
  v.strides = strides;
  return v;
}

int32_t dtype_uint8() {
  static const int32_t dtype = aoti_torch_dtype_uint8();
  return dtype;
}

int32_t dtype_of(Type type) {
  static const int32_t f32 = aoti_torch_dtype_float32(), f16 = aoti_torch_dtype_float16();
  static const int32_t bf16 = aoti_torch_dtype_bfloat16();
  return type == Type::F32 ? f32 : type == Type::F16 ? f16 : bf16;
}

std::optional<Type> float_type(int32_t dtype) {
  for (Type type : {Type::F32, Type::F16, Type::BF16})
    if (dtype == dtype_of(type)) return type;
  return std::nullopt;
}

std::string dtype_name(int32_t dtype) {
  const std::pair<int32_t, const char*> names[] = {
      {aoti_torch_dtype_float32(), "float32"},     {aoti_torch_dtype_float16(), "float16"},
      {aoti_torch_dtype_bfloat16(), "bfloat16"},   {aoti_torch_dtype_float64(), "float64"},
      {aoti_torch_dtype_uint8(), "uint8"},         {aoti_torch_dtype_int8(), "int8"},
      {aoti_torch_dtype_int16(), "int16"},         {aoti_torch_dtype_int32(), "int32"},
      {aoti_torch_dtype_int64(), "int64"},         {aoti_torch_dtype_bool(), "bool"},
      {aoti_torch_dtype_complex64(), "complex64"}, {aoti_torch_dtype_complex128(), "complex128"},
  };
  for (const auto& [id, name] : names)
    if (id == dtype) return name;
  return "dtype " + std::to_string(dtype);
}

Type require_float(const char* op, const char* argument, int32_t dtype) {
  if (auto type = float_type(dtype)) return *type;
  fail(op, argument, " has dtype ", dtype_name(dtype), "; expected float32, float16 or bfloat16");
}

const FormatInfo& format(const char* op, int64_t weight_type) {
  if (const FormatInfo* f = tinyblas::find_format(weight_type)) return *f;
  fail(op, "weight_type is ", weight_type, "; expected one of ", known_types(false));
}

const FormatInfo& packed_format(const char* op, int64_t weight_type) {
  const FormatInfo* f = tinyblas::find_format(weight_type);
  if (f != nullptr && f->packed_k != 0) return *f;
  fail(op, "weight_type is ", weight_type, "; expected one that has a packed layout: ", known_types(true));
}

namespace {

int64_t element_size(const View& weight, const Rows& r) {
  return weight.dtype == dtype_uint8() ? 1 : r.format->block_bytes;
}

// The format and K of a weight's rows.
Rows row_format(const char* op, const View& weight, std::optional<int64_t> weight_type) {
  if (weight.dim < 1) fail(op, "weight has no dimensions; expected rows in its last dimension");
  Rows r{};
  if (weight.dtype == dtype_uint8()) {
    if (!weight_type)
      fail(op, "weight is uint8 and weight_type is None; expected the type of its GGUF rows: ", known_types(false));
    r.format = &format(op, *weight_type);
    if (weight.last() % r.format->block_bytes != 0)
      fail(op, "weight has shape ", weight.shape(), "; a row of ", r.format->name, " takes a multiple of ",
           r.format->block_bytes, " bytes (", r.format->block, " elements a block)");
    r.k = weight.last() / r.format->block_bytes * r.format->block;
  } else {
    const auto type = float_type(weight.dtype);
    if (!type)
      fail(op, "weight has dtype ", dtype_name(weight.dtype),
           "; expected float32, float16, bfloat16, or uint8 with weight_type");
    if (weight_type && *weight_type != static_cast<int64_t>(*type))
      fail(op, "weight has dtype ", dtype_name(weight.dtype), " and weight_type is ", format(op, *weight_type).name,
           "; expected uint8 rows of that type, or a float weight without weight_type");
    r.format = tinyblas::find_format(static_cast<int64_t>(*type));
    r.k = weight.last();
  }
  return r;
}

// Uses `matrix`'s rows in place if they lie `ldw` bytes apart, each contiguous, and floats are aligned (GGUF blocks
// need not be). False otherwise.
bool use_in_place(Rows& r, const View& matrix) {
  const int64_t alignment = tinyblas::is_float(r.format->type) ? r.format->block_bytes : 1;
  if (!matrix.one_row_step(&r.ldw)) return false;
  r.ldw *= element_size(matrix, r);
  r.data = matrix.data;
  return r.ldw % alignment == 0 && r.expert_stride % alignment == 0 &&
         reinterpret_cast<uintptr_t>(r.data) % static_cast<uintptr_t>(alignment) == 0;
}

void use_copy(Rows& r, const View& weight) {
  r.copy = contiguous_copy(weight);
  r.data = data(r.copy);
  r.ldw = weight.last() * element_size(weight, r);
}

}  // namespace

Rows rows(const char* op, const View& weight, std::optional<int64_t> weight_type) {
  Rows r = row_format(op, weight, weight_type);
  r.n = weight.rows();
  if (!use_in_place(r, weight)) use_copy(r, weight);
  return r;
}

Rows expert_rows(const char* op, const View& weight, std::optional<int64_t> weight_type) {
  if (weight.dim != 3)
    fail(op, "weight has shape ", weight.shape(), "; expected three dimensions, [experts, out_features, in_features]");
  Rows r = row_format(op, weight, weight_type);
  View expert = weight;
  --expert.dim, ++expert.sizes, ++expert.strides;
  r.n = expert.rows();
  r.expert_stride = weight.strides[0] * element_size(weight, r);
  if (!use_in_place(r, expert)) {
    use_copy(r, weight);
    r.expert_stride = r.n * r.ldw;
  }
  return r;
}

void check_in_features(const char* op, const View& input, const View& weight, const Rows& r, const char* prefix) {
  if (r.k == input.last()) return;
  if (input.last() % r.format->block != 0)
    fail(op, "input has shape ", input.shape(), "; its last dimension, in_features, has to be a multiple of ",
         r.format->block, " for weight_type ", r.format->name);
  fail(op, "weight has shape ", weight.shape(), "; expected [", prefix, "N, ",
       weight.dtype == dtype_uint8() ? tinyblas::row_bytes(*r.format, input.last()) : input.last(),
       "] to match input's last dimension, ", input.last());
}

void check_packed_input(const char* op, const View& input, int64_t k) {
  if (input.last() != k) fail(op, "input has shape ", input.shape(), "; its last dimension is to be in_features, ", k);
}

// No weight is that wide; larger ones could overflow the number of bytes.
constexpr int64_t kLargestK = int64_t{1} << 48;

void check_packed(const char* op, const View& weight, const FormatInfo& f, int64_t n, int64_t k, int64_t leading) {
  if (n < 0 || k < 0) fail(op, "the packed weight's size was given as [", n, ", ", k, "]; expected no negative number");
  if (k > kLargestK) fail(op, "in_features is ", k, "; expected at most ", kLargestK);
  if (k % f.block != 0)
    fail(op, "in_features is ", k, "; expected a multiple of ", f.block, " for weight_type ", f.name);
  if (weight.dtype != dtype_uint8())
    fail(op, "weight has dtype ", dtype_name(weight.dtype), "; expected uint8 panels made by kt::pack");
  const int64_t panels = tinyblas::panel_count(n), bytes = tinyblas::panel_bytes(f, k);
  if (weight.dim != leading + 2 || weight.sizes[leading] != panels || weight.last() != bytes)
    fail(op, "weight has shape ", weight.shape(), "; expected [", leading != 0 ? "..., " : "", panels, ", ", bytes,
         "]: panels of a packed ", f.name, " matrix [", n, ", ", k, "]");
}

Indices::Indices(const char* op, const char* argument, const Handle& tensor)
    : op_(op), argument_(argument), view_(ops::view(op, argument, tensor.get())), count_(1) {
  wide_ = view_.dtype == aoti_torch_dtype_int64();
  if (!wide_ && view_.dtype != aoti_torch_dtype_int32())
    fail(op, argument, " has dtype ", dtype_name(view_.dtype), "; expected int64 or int32");
  values_ = contiguous_data(view_, copy_);
  for (int64_t d = 0; d < view_.dim; ++d) count_ *= view_.sizes[d];
}

void Indices::check_below(int64_t n, const char* what) const {
  for (int64_t at = 0; at < count_; ++at) {
    const int64_t index = (*this)[at];
    if (index >= 0 && index < n) continue;
    std::ostringstream text;
    text << "kt::" << op_ << ": " << argument_ << " holds " << index << "; expected 0 <= index < " << n << " (" << what
         << " of weight)";
    throw std::out_of_range(text.str());
  }
}

Handle empty(int64_t dim, const int64_t* sizes, int32_t dtype) {
  static const int32_t cpu = aoti_torch_device_type_cpu();
  int64_t strides[kMaxDims];
  int64_t stride = 1;
  for (int64_t i = dim - 1; i >= 0; --i) {
    strides[i] = stride;
    stride *= sizes[i] > 1 ? sizes[i] : 1;
  }
  AtenTensorHandle tensor;
  if (aoti_torch_empty_strided(dim, sizes, strides, dtype, cpu, 0, &tensor) != AOTI_TORCH_SUCCESS)
    throw std::runtime_error("kt: no memory for a tensor of " + std::to_string(dim > 0 ? strides[0] * sizes[0] : 1) +
                             " elements of " + dtype_name(dtype));
  return Handle(tensor);
}

Handle empty_like_rows(const View& like, int64_t last, int32_t dtype) {
  int64_t sizes[kMaxDims];
  for (int64_t i = 0; i + 1 < like.dim; ++i) sizes[i] = like.sizes[i];
  sizes[like.dim - 1] = last;
  return empty(like.dim, sizes, dtype);
}

Handle contiguous_copy(const View& source) {
  Handle copy = empty(source.dim, source.sizes, source.dtype);
  TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(copy.get(), source.tensor, 0));
  return copy;
}

void* data(const Handle& tensor) {
  void* pointer;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(tensor.get(), &pointer));
  return pointer;
}

const void* contiguous_data(const View& source, Handle& copy, int64_t alignment) {
  if (is_contiguous(source) && reinterpret_cast<uintptr_t>(source.data) % static_cast<uintptr_t>(alignment) == 0)
    return source.data;
  copy = contiguous_copy(source);
  return data(copy);
}

}  // namespace ktlinear::ops
