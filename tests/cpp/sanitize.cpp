// The kernels of one tier under AddressSanitizer and UBSan (`make sanitize`), without PyTorch. Every buffer lies on the
// heap and is exactly as large as tinyblas.h asks for, so a load or store past a row, a panel or the workspace ends the
// run. Weights are random bytes: every code, scale and index occurs. (Operands of inline assembly and gathers are not
// seen by the sanitizer; test_nothing_is_read_outside_the_tensors has guard pages for those.)
//
// Values are checked only by what needs no oracle: packed and plain rows, and any partition of the units, give the same
// bits; unpack undoes pack; NaN and infinity reach their own row and no other. The rest is tests/test_ops.py's.
#include "harness.h"

namespace {

[[noreturn]] void fail(const FormatInfo& f, const char* what, int64_t m, int64_t n, int64_t k) {
  std::printf("%s: %s at M = %d, N = %d, K = %d\n", f.name, what, int(m), int(n), int(k));
  std::exit(1);
}
void check(bool holds, const FormatInfo& f, const char* what, int64_t m, int64_t n, int64_t k) {
  if (!holds) fail(f, what, m, n, k);
}

float value(const Problem& p, const Exact& y, int64_t row, int64_t column) {
  const int64_t i = row * p.ldy + column;
  if (p.y_type == Type::F32) return y.as<float>()[i];
  const uint16_t h = y.as<uint16_t>()[i];
  const int exponent = p.y_type == Type::F16 ? 0x7C00 : 0x7F80;
  return (h & exponent) == exponent ? NAN : 1.f;  // all that is asked of it
}

void products(const Tier& tier, const FormatInfo& f, const Exact& rows, int64_t ldw, const Exact* panels, int64_t n,
              int64_t k, int64_t m) {
  static constexpr Type floats[] = {Type::F32, Type::F16, Type::BF16};
  const int64_t shape = m + n + k / f.block;
  Problem p{};
  p.m = m, p.n = n, p.k = k;
  p.w_type = f.type;
  p.x_type = p.y_type = floats[shape % 3];
  p.bias_type = floats[shape / 3 % 3];
  p.ldx = k + shape % 4, p.ldy = n + shape % 3;
  const int64_t element = p.x_type == Type::F32 ? 4 : 2, bias_element = p.bias_type == Type::F32 ? 4 : 2;
  Exact x(((m - 1) * p.ldx + k) * element, element), bias(n * bias_element, bias_element);
  for (int64_t r = 0; r < m; r++)
    for (int64_t i = 0; i < k; i++)
      store_float(x, p.x_type, r * p.ldx + i,
                  std::ldexp(1.f + static_cast<float>(random_bits() % 97) / 97, -3) * (random_bits() % 2 ? 1.f : -1.f));
  for (int64_t i = 0; i < n; i++) store_float(bias, p.bias_type, i, 1.5f);
  const int64_t special = m > 2 ? m / 2 : -1;
  if (special >= 0) store_float(x, p.x_type, special * p.ldx + k / 2, shape % 2 ? NAN : INFINITY);
  p.x = x.as();
  if (shape % 5) p.bias = bias.as();
  std::vector<int64_t> reversed(static_cast<size_t>(m));
  for (int64_t i = 0; i < m; i++) reversed[static_cast<size_t>(i)] = m - 1 - i;
  const Kernels& kernels = is_float(f.type) ? *tier.sgemm : *tier.mixmul;
  for (int exact = 0; exact < (is_float(f.type) ? 1 : 2); exact++) {
    p.exact = exact;
    p.packed = false, p.w = rows.as(), p.ldw = ldw;
    const Exact y = compute(kernels, p, false);
    check(compute(kernels, p, true) == y, f, "the bits depend on the partition", m, n, k);
    p.x_rows = p.y_rows = reversed.data();
    check(compute(kernels, p, false) == y, f, "rows in another order give other values", m, n, k);
    p.x_rows = p.y_rows = nullptr;
    for (int64_t c = 0; c < n && special >= 0; c++)
      check(!std::isfinite(value(p, y, special, c)), f, "NaN or infinity was made finite", m, n, k);
    if (!panels) continue;
    p.packed = true, p.w = panels->as(), p.ldw = 0;
    check(compute(kernels, p, exact) == y, f, "packed and plain rows differ", m, n, k);
  }
}

void conversions(const Codec& codec, const FormatInfo& f, const Exact& rows, int64_t ldw, const Exact& panels,
                 int64_t n, int64_t k) {
  const int64_t width = row_bytes(f, k), panel_total = panel_count(n);
  Exact again(n * width, 1);
  for (int64_t i = panel_total; i-- > 0;) {
    codec.pack(f.type, rows.as(), ldw, n, k, panels.as(), i, i + 1);
    codec.unpack(f.type, panels.as(), n, k, again.as(), i, i + 1);
  }
  for (int64_t r = 0; r < n; r++) {
    Exact row(width, 3), floats(k * 4), from_panel(k * 4);
    std::memcpy(row.as(), rows.as<char>() + r * ldw, static_cast<size_t>(width));
    check(std::memcmp(row.as(), again.as<char>() + r * width, static_cast<size_t>(width)) == 0, f,
          "unpack is not the reverse of pack", 0, n, k);
    codec.dequantize(f.type, row.as(), k / f.block, floats.as<float>());
    codec.dequantize_packed_row(f.type, panels.as(), k, r, from_panel.as<float>());
    check(floats == from_panel, f, "a packed row is decoded otherwise than a plain one", 0, n, k);
  }
}

void float_conversions(const Codec& codec, const FormatInfo& f) {
  for (int64_t count = 1; count < 36; count++) {
    Exact floats(count * 4), stored(count * f.block_bytes, f.block_bytes), again(count * 4);
    for (int64_t i = 0; i < count; i++) floats.as<float>()[i] = 0.75f - static_cast<float>(i);
    codec.convert(floats.as<float>(), count, f.type, stored.as());
    codec.widen(stored.as(), f.type, count, again.as<float>());
    check(floats == again, f, "small numbers change when they are stored", 0, 1, count);
  }
}

// Weights with what a quantizer may stumble over: zeros of both signs, subnormals, equal elements, one outlier.
void quantizers(const Tier& tier, const FormatInfo& f) {
  static constexpr float scales[] = {0.f, -0.f, 1e-45f, 1e-38f, 1e-20f, 3e-8f, 6e-5f, 1.f, -65504.f};
  const float kRoundedD = 0x1p-25f * 128 * 32;  // a subnormal fp16 d, times the largest codes
  const int64_t k = f.block * 3;
  for (float scale : scales)
    for (int pattern = 0; pattern < 10; pattern++) {
      const bool weighted = pattern >= 5;
      if (!weighted && needs_importance(f.type)) continue;
      Exact x(k * 4), importance(k * 4), blocks(row_bytes(f, k), 1), back(k * 4);
      for (int64_t i = 0; i < k; i++) {
        const float noise = static_cast<float>(static_cast<int>(random_bits() % 2001) - 1000) / 1000;
        const float patterns[] = {1, noise, i % 2 ? 1.f : -1.f, i % f.block == f.block - 1 ? 1.f : 0.f,
                                  i % f.block == 0 ? 1.f : noise / 1000};
        x.as<float>()[i] = scale * patterns[pattern % 5];
        importance.as<float>()[i] = i % 3 ? noise * noise : 0;
      }
      tier.quantize(f.type, x.as<float>(), k, weighted ? importance.as<float>() : nullptr, blocks.as());
      tier.codec->dequantize(f.type, blocks.as(), k / f.block, back.as<float>());
      const float room = (weighted ? 4 : 1.1f) * std::fabs(scale) + kRoundedD;  // any value will do without importance
      for (int64_t i = 0; i < k; i++)
        check(std::fabs(back.as<float>()[i] - x.as<float>()[i]) <= room, f, "a wild quantized value", pattern, 1, k);
    }
}

}  // namespace

int main() {
  int count;
  const Tier& tier = *tiers(&count);
  for (const FormatInfo& f : kFormats) {
    std::vector<int64_t> lengths;
    if (f.block == 1)
      lengths = {1, 13, 33, 515};
    else if (f.block < 256)
      lengths = {f.block, 3 * f.block, 352 / f.block * f.block, 35 * f.block};
    else
      lengths = {256, 768, 1280};
    for (int64_t k : lengths)
      for (int64_t n : {1, 13, 15, 17, 33}) {
        const int64_t width = row_bytes(f, k), element = f.block == 1 ? f.block_bytes : 1;
        const int64_t ldw = width + (n % 4) * 3 * element;
        Exact rows((n - 1) * ldw + width, element);
        rows.randomize();
        if (f.block == 1)  // finite
          for (int64_t i = 0; i < ((n - 1) * ldw + width) / element; i++) store_float(rows, f.type, i, 0.75f);
        std::unique_ptr<Exact> panels;
        if (f.packed_k) {
          panels = std::make_unique<Exact>(panel_count(n) * panel_bytes(f, k));
          conversions(*tier.codec, f, rows, ldw, *panels, n, k);
        }
        for (int64_t m : {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 40})
          if (m < 5 || n == 17 || (m + n) % 3 == 0) products(tier, f, rows, ldw, panels.get(), n, k, m);
        if (n == 33 && k == lengths[1]) products(tier, f, rows, ldw, panels.get(), n, k, 513);
      }
    if (is_float(f.type))
      float_conversions(*tier.codec, f);
    else
      quantizers(tier, f);
  }
  std::printf("%s: %d formats\n", tier.name, static_cast<int>(std::size(kFormats)));
}
