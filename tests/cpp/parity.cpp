// The kernels of one CPU checked against results from another, without PyTorch (`make test-arm`).
//
//   parity make FILE           inputs, and what `unsupported` of this build makes of them, to a file
//   parity check FILE TIER...  the named tiers of this build on the inputs of that file
//   parity hwcap               the kernel's two words of CPU capabilities
//
// The int8 mode is checked against exact results too, for an x rounded here as csrc/tinyblas/README.md says.
#include "harness.h"
#ifdef __linux__
#include <sys/auxv.h>
#endif

namespace {

const Tier* find_tier(const char* name) {
  int count;
  const Tier* all = tiers(&count);
  for (int i = 0; i < count; i++)
    if (!std::strcmp(all[i].name, name)) return all + i;
  std::printf("%s: not in this program\n", name);
  std::exit(1);
}

class File {
 public:
  File(const char* path, bool write) : file_(std::fopen(path, write ? "wb" : "rb")), write_(write) {
    if (!file_) std::perror(path), std::exit(1);
  }
  ~File() { std::fclose(file_); }
  // Writes or fills the buffer.
  void pass(const Exact& e, int64_t bytes) {
    const size_t n = static_cast<size_t>(bytes);
    if ((write_ ? std::fwrite(e.as(), 1, n, file_) : std::fread(e.as(), 1, n, file_)) != n) {
      std::printf("the file is too short\n");
      std::exit(1);
    }
  }

 private:
  std::FILE* file_;
  bool write_;
};

// x ~ dx * q per 32 elements.
void round_x(const float* x, int64_t k, float* out) {
  for (int64_t g = 0; g < k; g += 32) {
    float amax = 0;
    for (int64_t i = g; i < g + 32; i++) amax = std::max(amax, std::fabs(x[i]));
    float dx = amax / 127.f;
    uint32_t bits;
    std::memcpy(&bits, &dx, 4);
    bits = (bits + 0xFFFu) & 0xFFFFF000u;
    std::memcpy(&dx, &bits, 4);
    for (int64_t i = g; i < g + 32; i++) out[i] = amax > 0 ? std::nearbyint(x[i] * (1.f / dx)) * dx : 0.f;
  }
}

struct Case {
  const FormatInfo& f;
  int64_t m, n, k;
  Type x_type;
  Exact source, rows, x, bias, exact, rounded, norm;  // source: the floats that rows were quantized from

  Case(const FormatInfo& format, int64_t m_, int64_t n_, int64_t k_, Type x_type_)
      : f(format),
        m(m_),
        n(n_),
        k(k_),
        x_type(x_type_),
        source(n * k * 4),
        rows(n * row_bytes(f, k)),
        x(m * k * (x_type == Type::F32 ? 4 : 2)),
        bias(n * 4),
        exact(m * n * 4),
        rounded(m * n * 4),
        norm(m * n * 4) {}

  void pass(File& file) {
    file.pass(source, n * k * 4), file.pass(rows, n * row_bytes(f, k)),
        file.pass(x, m * k * (x_type == Type::F32 ? 4 : 2));
    file.pass(bias, n * 4), file.pass(exact, m * n * 4), file.pass(rounded, m * n * 4), file.pass(norm, m * n * 4);
  }
  Problem problem() const {
    Problem p{};
    p.m = m, p.n = n, p.k = k;
    p.x = x.as(), p.ldx = k, p.x_type = x_type;
    p.w = rows.as(), p.ldw = row_bytes(f, k), p.w_type = f.type;
    p.bias = bias.as(), p.bias_type = Type::F32;
    p.ldy = n, p.y_type = Type::F32;
    p.exact = true;
    return p;
  }
  const Kernels& kernels(const Tier& tier) const { return is_float(f.type) ? *tier.sgemm : *tier.mixmul; }
};

float random_float() {
  const float u = static_cast<float>(static_cast<int>(random_bits() % 20001) - 10000) / 10000;
  return u * u * u + u / 4;
}

void make(const Tier& tier, Case& c) {
  for (int64_t i = 0; i < c.n * c.k; i++) c.source.as<float>()[i] = random_float();
  for (int64_t i = 0; i < c.n; i++) c.bias.as<float>()[i] = random_float();
  std::vector<float> x(static_cast<size_t>(c.m * c.k)), xq(x.size()), w(static_cast<size_t>(c.n * c.k)),
      ones(static_cast<size_t>(c.k), 1.f);
  for (int64_t i = 0; i < c.m * c.k; i++)
    x[size_t(i)] = i / 32 % 9 == 4 ? 0.f : random_float() * static_cast<float>(1 + i % 7);
  tier.codec->convert(x.data(), c.m * c.k, c.x_type, c.x.as());
  tier.codec->widen(c.x.as(), c.x_type, c.m * c.k, x.data());
  for (int64_t r = 0; r < c.n; r++) {
    char* row = c.rows.as<char>() + r * row_bytes(c.f, c.k);
    if (is_float(c.f.type)) {
      tier.codec->convert(c.source.as<float>() + r * c.k, c.k, c.f.type, row);
      tier.codec->widen(row, c.f.type, c.k, w.data() + r * c.k);
    } else {
      tier.quantize(c.f.type, c.source.as<float>() + r * c.k, c.k, needs_importance(c.f.type) ? ones.data() : nullptr,
                    row);
      tier.codec->dequantize(c.f.type, row, c.k / c.f.block, w.data() + r * c.k);
    }
  }
  Problem p = c.problem();
  std::memcpy(c.exact.as(), compute(c.kernels(tier), p, false).as(), size_t(c.m * c.n * 4));
  if (!is_float(c.f.type)) {
    for (int64_t r = 0; r < c.m; r++) round_x(x.data() + r * c.k, c.k, xq.data() + r * c.k);
    p.x = xq.data(), p.x_type = Type::F32;
    std::memcpy(c.rounded.as(), compute(c.kernels(tier), p, false).as(), size_t(c.m * c.n * 4));
  } else {
    c.rounded.fill(0);
  }
  for (int64_t r = 0; r < c.m; r++)
    for (int64_t j = 0; j < c.n; j++) {
      double sum = c.bias.as<float>()[j], norm = std::fabs(sum);
      for (int64_t i = 0; i < c.k; i++) {
        const double product = double(x[size_t(r * c.k + i)]) * w[size_t(j * c.k + i)];
        sum += product, norm += std::fabs(product);
      }
      c.norm.as<float>()[r * c.n + j] = float(norm);
      if (!(std::fabs(sum - c.exact.as<float>()[r * c.n + j]) <= 2e-6 * norm)) {
        std::printf("%s: `unsupported` itself is wrong\n", c.f.name);
        std::exit(1);
      }
    }
}

double worst = 0;  // error in units of the sum of the magnitudes of the products

bool close(const Tier& tier, const Case& c, const char* what, const Exact& y, const Exact& expected) {
  for (int64_t i = 0; i < c.m * c.n; i++) {
    const double error = std::fabs(double(y.as<float>()[i]) - expected.as<float>()[i]) / c.norm.as<float>()[i];
    if (!(error <= 2e-6)) {
      std::printf("%s: %s, %s, M = %d, N = %d, K = %d: y[%d][%d] = %g, expected %g\n", tier.name, c.f.name, what,
                  int(c.m), int(c.n), int(c.k), int(i / c.n), int(i % c.n), y.as<float>()[i], expected.as<float>()[i]);
      return false;
    }
    worst = std::max(worst, error);
  }
  return true;
}

bool check(const Tier& tier, const Tier& portable, const Case& c) {
  Problem p = c.problem();
  if (is_float(c.f.type)) return close(tier, c, "rows", compute(c.kernels(tier), p, false), c.exact);
  const bool int8 = &tier != &portable;
  bool good = true;
  const int64_t bytes = panel_count(c.n) * panel_bytes(c.f, c.k);
  Exact panels(bytes), same(bytes), again(c.n * p.ldw);
  tier.codec->pack(c.f.type, c.rows.as(), p.ldw, c.n, c.k, panels.as(), 0, panel_count(c.n));
  portable.codec->pack(c.f.type, c.rows.as(), p.ldw, c.n, c.k, same.as(), 0, panel_count(c.n));
  tier.codec->unpack(c.f.type, panels.as(), c.n, c.k, again.as(), 0, panel_count(c.n));
  if (!(panels == same) || !(again == c.rows))
    std::printf("%s: %s: packed otherwise\n", tier.name, c.f.name), good = false;
  if (&tier == &portable && c.m == 1) {  // the quantizers of all tiers here
    std::vector<float> ones(static_cast<size_t>(c.k), 1.f);
    for (int64_t r = 0; r < c.n; r++)
      tier.quantize(c.f.type, c.source.as<float>() + r * c.k, c.k, needs_importance(c.f.type) ? ones.data() : nullptr,
                    again.as<char>() + r * p.ldw);
    if (!(again == c.rows)) std::printf("%s: %s: quantized otherwise\n", tier.name, c.f.name), good = false;
  }
  for (int packed = 0; packed < 2; packed++) {
    p.packed = packed, p.w = packed ? panels.as() : c.rows.as();
    p.exact = true;
    good &= close(tier, c, packed ? "exact, packed" : "exact, rows", compute(c.kernels(tier), p, packed), c.exact);
    p.exact = false;
    good &= close(tier, c, packed ? "int8, packed" : "int8, rows", compute(c.kernels(tier), p, packed),
                  int8 ? c.rounded : c.exact);
  }
  return good;
}

// All fp16 and bf16 numbers, and floats between them.
bool conversions(const Tier& tier, const Tier& portable) {
  constexpr int64_t n = 65536 + 3;
  bool good = true;
  for (Type type : {Type::F16, Type::BF16}) {
    Exact halves(n * 2), a(n * 4), b(n * 4), to_a(n * 2), to_b(n * 2);
    for (int64_t i = 0; i < n; i++) halves.as<uint16_t>()[i] = static_cast<uint16_t>(i);
    tier.codec->widen(halves.as(), type, n, a.as<float>());
    portable.codec->widen(halves.as(), type, n, b.as<float>());
    for (int64_t i = 0; i < n; i++) {
      if (a.as<uint32_t>()[i] != b.as<uint32_t>()[i] && !(std::isnan(a.as<float>()[i]) && std::isnan(b.as<float>()[i])))
        good = false;
      b.as<uint32_t>()[i] += static_cast<uint32_t>(random_bits()) % 3 * 0xFFF;
      if (i % 2) b.as<uint32_t>()[i] = static_cast<uint32_t>(random_bits());
    }
    tier.codec->convert(b.as<float>(), n, type, to_a.as());
    portable.codec->convert(b.as<float>(), n, type, to_b.as());
    for (int64_t i = 0; i < n; i++)
      if (to_a.as<uint16_t>()[i] != to_b.as<uint16_t>()[i] && !std::isnan(b.as<float>()[i])) good = false;
  }
  if (!good) std::printf("%s: 16-bit floats are converted otherwise\n", tier.name);
  return good;
}

template <class F>
void each_case(F f) {
  static constexpr Type floats[] = {Type::F32, Type::F16, Type::BF16};
  for (const FormatInfo& format : kFormats) {
    const int64_t b = format.block;
    const int64_t ks[] = {b == 1 ? 77 : b,
                          b == 1     ? 515
                          : b == 256 ? 768
                                     : 352 / b * b,
                          b == 1     ? 1
                          : b == 256 ? 1280
                                     : 1088};
    static constexpr int64_t ns[] = {1, 13, 33};
    for (int i = 0; i < 3; i++)
      for (int64_t m : {1, 3, 17}) {
        Case c(format, m, ns[i], ks[i], floats[(i + m) % 3]);
        f(c);
      }
    Case c(format, 17, 49, ks[1], Type::F32);
    f(c);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 2 && !std::strcmp(argv[1], "hwcap")) {
#ifdef __linux__
    std::printf("%lu %lu\n", getauxval(AT_HWCAP), getauxval(AT_HWCAP2));
#endif
    return 0;
  }
  const Tier& portable = *find_tier("unsupported");
  if (argc == 3 && !std::strcmp(argv[1], "make")) {
    File file(argv[2], true);
    each_case([&](Case& c) { make(portable, c), c.pass(file); });
    return 0;
  }
  if (argc < 4 || std::strcmp(argv[1], "check")) return std::printf("usage: see the source\n"), 2;
  bool good = true;
  for (int i = 3; i < argc; i++) {
    const Tier& tier = *find_tier(argv[i]);
    File file(argv[2], false);
    int cases = 0;
    bool passed = conversions(tier, portable);
    worst = 0;
    each_case([&](Case& c) { c.pass(file), passed &= check(tier, portable, c), cases++; });
    std::printf("  %-11s %d cases of %d types, %s; largest error %.1e of the sum of magnitudes\n", tier.name, cases,
                static_cast<int>(std::size(kFormats)), passed ? "all good" : "FAILED", worst);
    std::fflush(stdout);
    good &= passed;
  }
  return good ? 0 : 1;
}
