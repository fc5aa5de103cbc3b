// The packed records of a quantized W, wherever they come from.
#pragma once

#include "gemm.h"
#include "pack.h"

namespace ktlinear::tinyblas::KT_TIER {

enum Path { kExact, kDirect, kInt8 };

// The format that a view of it is packed as.
template <class D>
struct StoredAs {
  using type = D;
};
template <class D>
  requires requires { typename D::Stored; }
struct StoredAs<D> {
  using type = typename D::Stored;
};

// Records of 16 rows of W from row n on, for K in [k, k + kc): where they lie in a packed matrix, or packed into
// `scratch` first.
template <class D>
struct Records {
  static constexpr int kK = D::kGroups * 32;
  const Problem& p;
  int64_t panel_stride() const { return ceil_div(p.k, kK) * D::kRecordBytes; }
  const uint8_t* packed(int64_t n, int64_t k) const {
    return static_cast<const uint8_t*>(p.w) + n / kPanelRows * panel_stride() + k / kK * D::kRecordBytes;
  }
  const uint8_t* get(int64_t n, int64_t k, int64_t kc, uint8_t* scratch) const {
    if (p.packed) return packed(n, k);
    const int valid = static_cast<int>(min_of<int64_t>(kPanelRows, p.n - n));
    const int64_t row = k / D::kBlock * D::kBlockBytes, slice = kc / D::kBlock * D::kBlockBytes;
    const int64_t ahead = k + kc < p.k ? slice : kPanelRows * p.ldw - row;
    pack_records<typename StoredAs<D>::type>(static_cast<const uint8_t*>(p.w) + n * p.ldw, p.ldw, valid, p.k, k / kK,
                                             ceil_div(k + kc, kK), scratch, ahead);
    return scratch;
  }
  NextSlice next(int64_t n, int64_t k, int64_t kc, int64_t panels) const {
    if (p.packed)
      return {reinterpret_cast<const char*>(packed(n, k)), panel_stride(), ceil_div(kc, kK) * D::kRecordBytes, panels};
    return {static_cast<const char*>(p.w) + n * p.ldw + k / D::kBlock * D::kBlockBytes, p.ldw,
            kc / D::kBlock * D::kBlockBytes, panels * kPanelRows};
  }
};

}  // namespace ktlinear::tinyblas::KT_TIER
