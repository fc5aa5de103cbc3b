// Calls f.template operator()<Decoder>() for the decoder of a quantized type: the one switch over formats.
#pragma once

#include "decode/nibbles.h"
#include "decode/q8_0.h"

namespace ktlinear::tinyblas::KT_TIER {

template <class F>
KT_INLINE auto with_decoder(Type t, F f) {
  switch (t) {
    case Type::Q4_0:
      return f.template operator()<Q4_0>();
    case Type::Q4_1:
      return f.template operator()<Q4_1>();
    default:
      return f.template operator()<Q8_0>();
  }
}

// The table of formats.h and the decoders agree.
template <class D>
constexpr bool matches(Type t) {
  const FormatInfo* f = find_format(static_cast<int64_t>(t));
  return f && f->packed_bytes == D::kRecordBytes && f->packed_k == D::kGroups * 32 && f->block_bytes == D::kBlockBytes;
}
static_assert(matches<Q4_0>(Type::Q4_0) && matches<Q4_1>(Type::Q4_1) && matches<Q8_0>(Type::Q8_0));

}  // namespace ktlinear::tinyblas::KT_TIER
