// Runs the kernels once each, between calls of getppid, for the emulator to count (scripts/count_arm.py).
//
//   count TIER M N K     prints the names of the weight types in the order of the counts
#include <unistd.h>

#include "harness.h"

int main(int argc, char** argv) {
  if (argc != 5) return std::printf("usage: see the source\n"), 2;
  int count;
  const Tier* tier = tiers(&count);
  while (count > 0 && std::strcmp(tier->name, argv[1])) tier++, count--;
  if (count == 0) return std::printf("%s: not in this program\n", argv[1]), 2;
  Problem p{};
  p.m = std::atoi(argv[2]), p.n = std::atoi(argv[3]), p.k = std::atoi(argv[4]);
  Exact x(p.m * p.k * 4), y(p.m * p.n * 4);
  for (int64_t i = 0; i < p.m * p.k; i++) x.as<float>()[i] = static_cast<float>(i % 251) - 125.f;
  p.x = x.as(), p.ldx = p.k, p.x_type = Type::F32;
  p.y = y.as(), p.ldy = p.n, p.y_type = Type::F32;
  for (const FormatInfo& f : kFormats) {
    p.w_type = f.type, p.ldw = row_bytes(f, p.k), p.packed = !is_float(f.type);
    Exact rows(p.n * p.ldw), panels(p.packed ? panel_count(p.n) * panel_bytes(f, p.k) : 1);
    rows.fill(0);  // no branch of a kernel depends on the weights
    if (p.packed) tier->codec->pack(f.type, rows.as(), p.ldw, p.n, p.k, panels.as(), 0, panel_count(p.n));
    p.w = p.packed ? panels.as() : rows.as();
    const Kernels& kernels = p.packed ? *tier->mixmul : *tier->sgemm;
    const Plan plan = kernels.plan(p, 1);
    Exact activations(plan.activation_bytes), scratch(plan.scratch_bytes);
    (void)getppid();
    if (!kernels.prepare(p, plan, activations.as(), 0, plan.prepare_units)) return 1;
    kernels.compute(p, plan, activations.as(), scratch.as(), 0, plan.compute_units);
    (void)getppid();
    std::printf("%s\n", f.name);
  }
  return 0;
}
