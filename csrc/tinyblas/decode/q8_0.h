// Q8_0. Packed record, two groups (64 elements) of 16 rows, 1088 bytes (see nibbles.h for what a decoder is):
//   | group 0: 8 steps x [16 rows][4 bytes] | group 1 | 2 x 16 fp16 d |
// Codes are stored as q + 128, unsigned as the dot-product instructions want them. A foreign file may hold q = -128.
#pragma once

#include "rows.h"

namespace ktlinear::tinyblas::KT_TIER {

struct Q8_0 {
  static constexpr bool kHasMinimum = false;
  static constexpr int kOffset = 128, kMaxCode = 255, kGroups = 2, kScales = 1;
  static constexpr int kScaleBytes = 1024, kRecordBytes = 1088, kBlock = 32, kBlockBytes = sizeof(BlockQ8_0);

  template <int S>
  KT_INLINE static I32 code(const uint8_t* record, int group, int v) {
    return load_i(record + group * 512 + S * 64 + v * kLanes * 4);
  }
  KT_INLINE static F32 scale(const uint8_t* record, int group, int, int v) {
    return load_f16(reinterpret_cast<const uint16_t*>(record + kScaleBytes + group * 32) + v * kLanes);
  }
  KT_INLINE static F32 minimum(const uint8_t*, int, int, int) { return zero(); }

  template <class Rows>
  KT_INLINE static void pack(const Rows& rows, uint8_t* record, int group) {
    typename Rows::W w[4];
    rows.load(0, w);
    rows.put_half(record + kScaleBytes + group * 32, w[0]);
    KT_UNROLL for (int s = 0; s < 8; s++) {
      if (s % 4 == 0) rows.load(2 + s * 4, w);
      rows.put(record + group * 512 + s * 64, bxor(w[s % 4], Rows::all(0x80808080)));
    }
  }
  KT_INLINE static void unpack_block(const uint8_t* record, int group, int row, uint8_t* block) {
    KT_UNROLL for (int s = 0; s < 8; s++) {
      const uint32_t word = load_as<uint32_t>(record + group * 512 + s * 64 + row * 4) ^ 0x80808080u;
      std::memcpy(block + 2 + s * 4, &word, 4);
    }
    std::memcpy(block, record + kScaleBytes + group * 32 + row * 2, 2);
  }

  static void dequantize(const uint8_t* p, float* out) {
    BlockQ8_0 b;
    std::memcpy(&b, p, sizeof b);
    const float d = half_to_float(b.d);
    for (int i = 0; i < 32; i++) out[i] = static_cast<float>(b.qs[i]) * d;
  }
};

}  // namespace ktlinear::tinyblas::KT_TIER
