// The one list of quantized formats: type and decoder.
#pragma once

#include "decode/codebook.h"
#include "decode/iq.h"
#include "decode/k_quants.h"
#include "decode/nibbles.h"
#include "decode/q8_0.h"
#include "decode/ternary.h"

// clang-format off
#define KT_FORMATS(X) \
  X(Q4_0) X(Q4_1) X(Q5_0) X(Q5_1) X(Q8_0) \
  X(Q2_K) X(Q3_K) X(Q4_K) X(Q5_K) X(Q6_K) \
  X(IQ4_NL) X(MXFP4) X(NVFP4) X(IQ4_XS) \
  X(TQ1_0) X(TQ2_0) \
  X(IQ2_XXS) X(IQ2_XS) X(IQ2_S) X(IQ3_XXS) X(IQ3_S) X(IQ1_S) X(IQ1_M)
// clang-format on

namespace ktlinear::tinyblas::KT_TIER {

// Calls f.template operator()<Decoder>() for the decoder of a quantized type.
template <class F>
KT_INLINE auto with_decoder(Type t, F f) {
  switch (t) {
#define KT_CASE(name) \
  case Type::name:    \
    return f.template operator()<name>();
    KT_FORMATS(KT_CASE)
#undef KT_CASE
    default:
      __builtin_unreachable();  // csrc/ops lets only types of the table through
  }
}

// The table of formats.h and the decoders agree.
template <class D>
constexpr bool matches(Type t) {
  const FormatInfo* f = find_format(static_cast<int64_t>(t));
  return f && f->block == D::kBlock && f->block_bytes == D::kBlockBytes && f->packed_k == D::kGroups * 32 &&
         f->packed_bytes == D::kRecordBytes && D::kRecordBytes % 64 == 0;
}
#define KT_CHECK(name) static_assert(matches<name>(Type::name));
KT_FORMATS(KT_CHECK)
#undef KT_CHECK

}  // namespace ktlinear::tinyblas::KT_TIER
