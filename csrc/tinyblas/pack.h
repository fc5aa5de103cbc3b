// GGUF rows <-> packed panels, and conversions of whole blocks: the tier's Codec.
#pragma once

#include "formats_list.h"

namespace ktlinear::tinyblas::KT_TIER {

template <class D>
inline constexpr int kBlocksPerRecord = D::kGroups * 32 / D::kBlock;

// Block b of one row of a packed matrix -> a GGUF block.
template <class D>
KT_NOINLINE void unpack_from_panel(const uint8_t* panel, int64_t row, int64_t b, uint8_t* block) {
  D::unpack_block(panel + b / kBlocksPerRecord<D> * D::kRecordBytes, static_cast<int>(b % kBlocksPerRecord<D>),
                  static_cast<int>(row % kPanelRows), block);
}

template <class D>
KT_INLINE void pack_one(const uint8_t* block, uint8_t* record, int index, int row) {
  if constexpr (requires { D::pack(OneRow{block, row}, record, index); })
    D::pack(OneRow{block, row}, record, index);
  else
    D::pack_block(block, record, index, row);
}

// Records [begin, end) of one panel from `valid` <= 16 rows; missing rows and the K padding of the last record become
// zero blocks.
// As many bytes of each row are fetched `ahead` bytes further on: sixteen short strided streams are too many for the
// hardware.
template <class D>
KT_NOINLINE void pack_records(const uint8_t* rows, int64_t ldw, int valid, int64_t k, int64_t begin, int64_t end,
                              uint8_t* out, int64_t ahead) {
  constexpr int64_t block_bytes = D::kBlockBytes, blocks_per_record = kBlocksPerRecord<D>;
  const int64_t b0 = begin * blocks_per_record, b1 = end * blocks_per_record, known = min_of(k / D::kBlock, b1);
  const uint8_t nothing[block_bytes] = {};
  auto fetch = [&](const uint8_t* block) KT_ALWAYS_INLINE_LAMBDA {
    KT_UNROLL for (int64_t o = 0; o < block_bytes; o += 64)
      prefetch_l2(block + ahead + o);
  };
  for (int64_t b = b0; b < b1; b++) {
    uint8_t* record = out + (b - b0) / blocks_per_record * D::kRecordBytes;
    const int index = static_cast<int>((b - b0) % blocks_per_record);
    const uint8_t* block = rows + b * block_bytes;
    if constexpr (requires { D::pack(OneRow{block, 0}, record, index); }) {
      if (valid == kPanelRows && b < known) {
        KT_UNROLL for (int v = 0; v < kPanelRows / kLanes; v++) {
          if (index % (64 / min_of<int64_t>(block_bytes, 64)) == 0) {
            KT_UNROLL for (int r = 0; r < kLanes; r++)
              fetch(block + (v * kLanes + r) * ldw);
          }
          D::pack(VectorOfRows{block + v * kLanes * ldw, ldw, v}, record, index);
        }
        continue;
      }
    }
    for (int r = 0; r < kPanelRows; r++, block += ldw) {
      if (r < valid && b < known) {
        fetch(block);
        pack_one<D>(block, record, index, r);
      } else {
        pack_one<D>(nothing, record, index, r);
      }
    }
  }
}

static void codec_pack(Type type, const void* rows, int64_t ldw, int64_t n, int64_t k, void* packed, int64_t begin,
                       int64_t end) {
  with_decoder(type, [&]<class D>() {
    const int64_t records = ceil_div(k, D::kGroups * 32);
    for (int64_t panel = begin; panel < end; panel++) {
      const int64_t row = panel * kPanelRows;
      pack_records<D>(static_cast<const uint8_t*>(rows) + row * ldw, ldw,
                      static_cast<int>(min_of<int64_t>(kPanelRows, n - row)), k, 0, records,
                      static_cast<uint8_t*>(packed) + panel * records * D::kRecordBytes, kPanelRows * ldw);
    }
  });
}
static void codec_unpack(Type type, const void* packed, int64_t n, int64_t k, void* rows, int64_t begin, int64_t end) {
  with_decoder(type, [&]<class D>() {
    const int64_t records = ceil_div(k, D::kGroups * 32), blocks = k / D::kBlock;
    for (int64_t row = begin * kPanelRows; row < min_of(n, end * kPanelRows); row++) {
      const uint8_t* panel = static_cast<const uint8_t*>(packed) + row / kPanelRows * records * D::kRecordBytes;
      uint8_t* out = static_cast<uint8_t*>(rows) + row * blocks * D::kBlockBytes;
      for (int64_t b = 0; b < blocks; b++) unpack_from_panel<D>(panel, row, b, out + b * D::kBlockBytes);
    }
  });
}
static void codec_dequantize(Type type, const void* blocks, int64_t count, float* out) {
  with_decoder(type, [&]<class D>() {
    for (int64_t b = 0; b < count; b++)
      D::dequantize(static_cast<const uint8_t*>(blocks) + b * D::kBlockBytes, out + b * D::kBlock);
  });
}
static void codec_dequantize_packed_row(Type type, const void* packed, int64_t k, int64_t row, float* out) {
  with_decoder(type, [&]<class D>() {
    const int64_t records = ceil_div(k, D::kGroups * 32);
    const uint8_t* panel = static_cast<const uint8_t*>(packed) + row / kPanelRows * records * D::kRecordBytes;
    for (int64_t b = 0; b < k / D::kBlock; b++) {
      uint8_t block[D::kBlockBytes];
      unpack_from_panel<D>(panel, row, b, block);
      D::dequantize(block, out + b * D::kBlock);
    }
  });
}
static void codec_convert(const float* in, int64_t count, Type out_type, void* out) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store_float(out, out_type, i, load(in + i));
  for (; i < count; i++) store_element(out, out_type, i, in[i]);
}
static void codec_widen(const void* in, Type in_type, int64_t count, float* out) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(out + i, load_float(in, in_type, i));
  for (; i < count; i++) out[i] = load_element(in, in_type, i);
}

extern const Codec codec;
constinit const Codec codec{codec_pack,    codec_unpack, codec_dequantize, codec_dequantize_packed_row,
                            codec_convert, codec_widen};

}  // namespace ktlinear::tinyblas::KT_TIER
