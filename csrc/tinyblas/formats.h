// Weight types and their block geometry. Ids are the GGML type ids, so that a GGUF file, the `gguf` package and the
// op's `weight_type` argument share one vocabulary.
#pragma once

#include <cstdint>

// The functions here are `static`: each translation unit keeps its own copy, so the linker can never hand one that was
// compiled with AVX-512 to code that runs on an older CPU.
namespace ktlinear::tinyblas {

enum class Type : int32_t {
  F32 = 0,
  F16 = 1,
  Q4_0 = 2,
  Q4_1 = 3,
  Q5_0 = 6,
  Q5_1 = 7,
  Q8_0 = 8,
  Q2_K = 10,
  Q3_K = 11,
  Q4_K = 12,
  Q5_K = 13,
  Q6_K = 14,
  IQ2_XXS = 16,
  IQ2_XS = 17,
  IQ3_XXS = 18,
  IQ1_S = 19,
  IQ4_NL = 20,
  IQ3_S = 21,
  IQ2_S = 22,
  IQ4_XS = 23,
  IQ1_M = 29,
  BF16 = 30,
  TQ1_0 = 34,
  TQ2_0 = 35,
  MXFP4 = 39,
  NVFP4 = 40,
};

// On-disk blocks. All little-endian, no padding; `d` and `m` are IEEE fp16 bits. 1- or 2-byte aligned in a file, so the
// kernels never dereference these through a cast pointer: they memcpy or load unaligned.
struct BlockQ4_0 {
  uint16_t d;
  uint8_t qs[16];  // low nibble of qs[j] = element j, high nibble = element j + 16; w = d * (q - 8)
};
struct BlockQ4_1 {
  uint16_t d, m;
  uint8_t qs[16];  // as Q4_0; w = d * q + m
};
struct BlockQ5_0 {
  uint16_t d;
  uint8_t qh[4];   // bit 4 of element e = bit e of the little-endian word
  uint8_t qs[16];  // as Q4_0; w = d * (q - 16)
};
struct BlockQ5_1 {
  uint16_t d, m;
  uint8_t qh[4];
  uint8_t qs[16];  // as Q5_0; w = d * q + m
};
struct BlockQ8_0 {
  uint16_t d;
  int8_t qs[32];  // w = d * q
};
static_assert(sizeof(BlockQ4_0) == 18 && sizeof(BlockQ4_1) == 20 && sizeof(BlockQ8_0) == 34);
static_assert(sizeof(BlockQ5_0) == 22 && sizeof(BlockQ5_1) == 24);
// 256 elements: element e is in half n = e / 128, group j = e % 128 / 32 of it, at position l = e % 32.
struct BlockQ2_K {
  uint8_t scales[16];  // per 16 elements: low nibble sc, high nibble m
  uint8_t qs[64];      // bits 2j, 2j + 1 of qs[32n + l]
  uint16_t d, dmin;    // w = d * sc * q - dmin * m
};
struct BlockQ3_K {
  uint8_t hmask[32];   // bit 2 of q: bit 4n + j of hmask[l]
  uint8_t qs[64];      // its low bits, as Q2_K
  uint8_t scales[12];  // sixteen of six bits
  uint16_t d;          // w = d * (sc - 32) * (q - 4)
};
struct BlockQ4_K {
  uint16_t d, dmin;
  uint8_t scales[12];  // eight (sc, m) of six bits
  uint8_t qs[128];     // element 64g + l: low nibble of qs[32g + l], 64g + 32 + l: high; w = d * sc * q - dmin * m
};
struct BlockQ5_K {
  uint16_t d, dmin;
  uint8_t scales[12];
  uint8_t qh[32];  // bit 4 of element e: bit e / 32 of qh[e % 32]
  uint8_t qs[128];
};
struct BlockQ6_K {
  uint8_t ql[128];    // low nibbles (j = 0, 1) and high ones (j = 2, 3) of ql[64n + 32 (j % 2) + l]
  uint8_t qh[64];     // bits 4, 5 of q: bits 2j, 2j + 1 of qh[32n + l]
  int8_t scales[16];  // w = d * sc * (q - 32)
  uint16_t d;
};
static_assert(sizeof(BlockQ2_K) == 84 && sizeof(BlockQ3_K) == 110 && sizeof(BlockQ6_K) == 210);
static_assert(sizeof(BlockQ4_K) == 144 && sizeof(BlockQ5_K) == 176);
struct BlockIQ4_NL {
  uint16_t d;
  uint8_t qs[16];  // as Q4_0; w = d * level[q]
};
struct BlockMXFP4 {
  uint8_t e;       // E8M0
  uint8_t qs[16];  // as Q4_0; w = 2^(e - 128) * level[q]
};
struct BlockNVFP4 {
  uint8_t d[4];    // unsigned E4M3, one per 16 elements
  uint8_t qs[32];  // 8 bytes per 16 elements: low nibbles elements 0..7, high ones 8..15; w = d / 2 * level[q]
};
struct BlockIQ4_XS {
  uint16_t d;
  uint16_t scales_h;    // bits 2i, 2i + 1: the high bits of group i's sub-scale
  uint8_t scales_l[4];  // nibble i: the low bits
  uint8_t qs[128];      // 16 bytes per 32 elements, as Q4_0; w = d * (scale - 32) * level[q]
};
struct BlockTQ1_0 {
  // Base-3 digits, five a byte: digit n of qs[m] is element 32n + m, of qs[32 + m] element 160 + 16n + m; four a byte:
  // digit n of qh[m] is element 240 + 4n + m. w = d * (q - 1)
  uint8_t qs[48], qh[4];
  uint16_t d;
};
struct BlockTQ2_0 {
  uint8_t qs[64];  // bits 2l, 2l + 1 of qs[32j + m]: element 128j + 32l + m; w = d * (q - 1)
  uint16_t d;
};
struct BlockIQ2_XXS {
  uint16_t d;
  uint8_t qs[64];  // per 32 elements four indices, then a little-endian word: four 7-bit sign indices and a 4-bit scale
};
struct BlockIQ2_XS {
  uint16_t d;
  uint16_t qs[32];    // per eight elements: 9 bits of index, a 7-bit sign index
  uint8_t scales[8];  // a nibble per 16 elements
};
struct BlockIQ2_S {
  uint16_t d;
  uint8_t qs[32], signs[32];  // per eight elements: low bits of the index, signs
  uint8_t qh[8];              // two high bits of four indices
  uint8_t scales[8];          // a nibble per 16 elements
};
struct BlockIQ3_XXS {
  uint16_t d;
  uint8_t qs[64];  // an index per four elements
  uint8_t a[32];   // per 32 elements a word as in IQ2_XXS
};
struct BlockIQ3_S {
  uint16_t d;
  uint8_t qs[64], qh[8];  // per four elements: low bits of the index; the high bit of eight indices
  uint8_t signs[32];
  uint8_t scales[4];  // a nibble per 32 elements
};
struct BlockIQ1_S {
  uint16_t d;
  uint8_t qs[32];  // per eight elements: low bits of the index
  uint16_t qh[8];  // per 32 elements: four times three high bits, a 3-bit scale, the direction
};
struct BlockIQ1_M {
  uint8_t qs[32], qh[16];  // per eight elements: low bits of the index; a nibble of three high bits and the direction
  uint8_t scales[8];       // little-endian words of four 3-bit scales (per 16 elements) and four bits of the fp16 d
};
static_assert(sizeof(BlockIQ4_NL) == 18 && sizeof(BlockMXFP4) == 17 && sizeof(BlockNVFP4) == 36);
static_assert(sizeof(BlockIQ4_XS) == 136 && sizeof(BlockTQ1_0) == 54 && sizeof(BlockTQ2_0) == 66);
static_assert(sizeof(BlockIQ2_XXS) == 66 && sizeof(BlockIQ2_XS) == 74 && sizeof(BlockIQ2_S) == 82);
static_assert(sizeof(BlockIQ3_XXS) == 98 && sizeof(BlockIQ3_S) == 110 && sizeof(BlockIQ1_S) == 50);
static_assert(sizeof(BlockIQ1_M) == 56);

// One row of the table of formats. Floats have block = 1.
//   packed_k, packed_bytes: one record of the packed layout holds packed_k elements of 16 rows (see README.md).
struct FormatInfo {
  Type type;
  const char* name;
  int block;         // elements per GGUF block
  int block_bytes;   // bytes per GGUF block
  int packed_k;      // elements of K per packed record; 0: cannot be packed
  int packed_bytes;  // bytes per packed record of 16 rows
};

inline constexpr int kPanelRows = 16;

inline constexpr FormatInfo kFormats[] = {
    {Type::F32, "F32", 1, 4, 0, 0},
    {Type::F16, "F16", 1, 2, 0, 0},
    {Type::BF16, "BF16", 1, 2, 0, 0},
    {Type::Q4_0, "Q4_0", 32, sizeof(BlockQ4_0), 64, 576},
    {Type::Q4_1, "Q4_1", 32, sizeof(BlockQ4_1), 64, 640},
    {Type::Q5_0, "Q5_0", 32, sizeof(BlockQ5_0), 64, 704},
    {Type::Q5_1, "Q5_1", 32, sizeof(BlockQ5_1), 64, 768},
    {Type::Q8_0, "Q8_0", 32, sizeof(BlockQ8_0), 64, 1088},
    {Type::Q2_K, "Q2_K", 256, sizeof(BlockQ2_K), 256, 1344},
    {Type::Q3_K, "Q3_K", 256, sizeof(BlockQ3_K), 256, 1856},
    {Type::Q4_K, "Q4_K", 256, sizeof(BlockQ4_K), 256, 2368},
    {Type::Q5_K, "Q5_K", 256, sizeof(BlockQ5_K), 256, 2880},
    {Type::Q6_K, "Q6_K", 256, sizeof(BlockQ6_K), 256, 3392},
    {Type::IQ4_NL, "IQ4_NL", 32, sizeof(BlockIQ4_NL), 64, 576},
    {Type::MXFP4, "MXFP4", 32, sizeof(BlockMXFP4), 128, 1088},
    {Type::NVFP4, "NVFP4", 64, sizeof(BlockNVFP4), 64, 576},
    {Type::IQ4_XS, "IQ4_XS", 256, sizeof(BlockIQ4_XS), 256, 2176},
    {Type::TQ1_0, "TQ1_0", 256, sizeof(BlockTQ1_0), 256, 1088},
    {Type::TQ2_0, "TQ2_0", 256, sizeof(BlockTQ2_0), 256, 1088},
    {Type::IQ2_XXS, "IQ2_XXS", 256, sizeof(BlockIQ2_XXS), 256, 1664},
    {Type::IQ2_XS, "IQ2_XS", 256, sizeof(BlockIQ2_XS), 256, 1728},
    {Type::IQ2_S, "IQ2_S", 256, sizeof(BlockIQ2_S), 256, 1728},
    {Type::IQ3_XXS, "IQ3_XXS", 256, sizeof(BlockIQ3_XXS), 256, 2176},
    {Type::IQ3_S, "IQ3_S", 256, sizeof(BlockIQ3_S), 256, 2176},
    {Type::IQ1_S, "IQ1_S", 256, sizeof(BlockIQ1_S), 256, 1152},
    {Type::IQ1_M, "IQ1_M", 256, sizeof(BlockIQ1_M), 256, 1216},
};

// nullptr if the id is not in the table.
static inline constexpr const FormatInfo* find_format(int64_t id) {
  for (const FormatInfo& f : kFormats)
    if (static_cast<int64_t>(f.type) == id) return &f;
  return nullptr;
}
// The types that ggml refuses to quantize without one (ggml_quantize_requires_imatrix).
static inline constexpr bool needs_importance(Type t) {
  return t == Type::IQ2_XXS || t == Type::IQ2_XS || t == Type::IQ1_S;
}
static inline constexpr bool is_float(Type t) { return t == Type::F32 || t == Type::F16 || t == Type::BF16; }

static inline constexpr int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }

// Bytes of one GGUF row of k elements (k a multiple of the block).
static inline constexpr int64_t row_bytes(const FormatInfo& f, int64_t k) { return k / f.block * f.block_bytes; }
// Bytes of one packed panel of 16 rows. K is padded with zero blocks to a whole record.
static inline constexpr int64_t panel_bytes(const FormatInfo& f, int64_t k) {
  return ceil_div(k, f.packed_k) * f.packed_bytes;
}
static inline constexpr int64_t panel_count(int64_t n) { return ceil_div(n, kPanelRows); }

}  // namespace ktlinear::tinyblas
