// Mixture of experts: y[t, j] = W[ids[t, j]] * x[t]. The rows of x are grouped by expert, so that each expert's weights
// are read once; the kernels gather the rows while they prepare them and scatter the outputs while they store them.
//
// All experts' units are scheduled together: one parallel region prepares, one computes, whether a few experts have
// many rows each or many have one.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "common.h"
#include "multiply.h"
#include "workspace.h"

namespace ktlinear::ops {

using tinyblas::FormatInfo;
using tinyblas::Kernels;
using tinyblas::Plan;
using tinyblas::Problem;

namespace {

// Elements of activations that are prepared at a time: bounds the workspace, to 32 MiB where they are fp32. A chunk of
// rows of one expert always fits.
constexpr int64_t kBatchElements = int64_t{8} << 20;
// Work that is handed out dynamically comes in at least so many pieces a thread.
constexpr int64_t kPiecesPerThread = 4;

// Some rows of one expert.
struct Job {
  Problem problem;
  Plan plan;
  size_t source;        // the job whose activations it takes: itself, or an earlier one with the same single row of x
  int64_t activations;  // where they are in the workspace
};

// The units of all jobs as one range.
class Units {
 public:
  explicit Units(size_t jobs) { first_.reserve(jobs + 1), first_.push_back(0); }
  void add(int64_t count) { first_.push_back(first_.back() + count); }
  int64_t total() const { return first_.back(); }
  // Calls f(job, begin, end), in the job's own units, for each job's part of [begin, end).
  template <class F>
  void parts(int64_t begin, int64_t end, const F& f) const {
    auto job = static_cast<size_t>(std::upper_bound(first_.begin(), first_.end(), begin) - first_.begin() - 1);
    for (; begin < end; ++job) {
      const int64_t stop = std::min(end, first_[job + 1]);
      if (begin < stop) f(job, begin - first_[job], stop - first_[job]);
      begin = stop;
    }
  }

 private:
  std::vector<int64_t> first_;  // of each job, then the total
};

// Plans, prepares and computes; what does not fit int8 again as `exact`.
void run(std::vector<Job>& jobs) {
  if (jobs.empty()) return;
  const Problem& any = jobs.front().problem;
  const Kernels& kernels = kernels_for(any.w_type);
  int64_t rows = 0, prepared_rows = 0;
  for (size_t i = 0; i < jobs.size(); ++i) {
    rows += jobs[i].problem.m;
    if (jobs[i].source == i) prepared_rows += jobs[i].problem.m;
  }
  const int threads = compute_threads(any.w_type, rows * any.n * any.k);

  int64_t activation_bytes = 0, scratch_bytes = 0;
  bool alike = true;  // small products on equally many rows
  Units prepare(jobs.size()), compute(jobs.size());
  for (size_t i = 0; i < jobs.size(); ++i) {
    Job& job = jobs[i];
    // As many threads as its share of the work: a product that has all of them is cut into smaller units.
    job.plan = kernels.plan(job.problem, static_cast<int>(tinyblas::ceil_div(threads * job.problem.m, rows)));
    if (job.source == i) {
      job.activations = activation_bytes;
      activation_bytes += tinyblas::ceil_div(job.plan.activation_bytes, kPackedAlignment) * kPackedAlignment;
    } else {
      job.activations = jobs[job.source].activations;
    }
    scratch_bytes = std::max(scratch_bytes, job.plan.scratch_bytes);
    alike &= !job.plan.dynamic && job.problem.m == any.m;
    prepare.add(job.source == i ? job.plan.prepare_units : 0);
  }
  Lease activations(activation_buffer(), activation_bytes);
  const auto activations_of = [&](const Job& job) { return static_cast<char*>(activations.data()) + job.activations; };

  std::vector<std::atomic<bool>> unfit(jobs.size());
  split(prepare.total(), prepare_threads(prepared_rows * any.k, threads), false, [&](int64_t begin, int64_t end) {
    prepare.parts(begin, end, [&](size_t i, int64_t b, int64_t e) {
      if (!kernels.prepare(jobs[i].problem, jobs[i].plan, activations_of(jobs[i]), b, e)) unfit[i] = true;
    });
  });

  // Where all units cost the same each thread takes one contiguous range of them, which the prefetcher likes best.
  // Otherwise pieces are handed out one by one: the units of a large product, ranges of those of a small one.
  const int64_t pieces = tinyblas::ceil_div(kPiecesPerThread * threads, static_cast<int64_t>(jobs.size()));
  for (const Job& job : jobs) {
    if (unfit[job.source])
      compute.add(0);
    else
      compute.add(alike || job.plan.dynamic ? job.plan.compute_units : std::min(job.plan.compute_units, pieces));
  }
  split(compute.total(), threads, !alike, [&](int64_t begin, int64_t end) {
    Lease scratch(scratch_buffer(), scratch_bytes);
    compute.parts(begin, end, [&](size_t i, int64_t b, int64_t e) {
      const Job& job = jobs[i];
      if (!alike && !job.plan.dynamic) {
        const int64_t units = job.plan.compute_units, count = std::min(units, pieces);
        b = units * b / count, e = units * e / count;
      }
      kernels.compute(job.problem, job.plan, activations_of(job), scratch.data(), b, e);
    });
  });

  std::vector<Job> exact;
  for (Job& job : jobs) {
    if (!unfit[job.source]) continue;
    exact.push_back(job);
    exact.back().problem.exact = true;
    exact.back().source = exact.size() - 1;
  }
  run(exact);
}

// The weights of all experts, as the kernels take them.
struct Experts {
  Problem problem;        // n, k and the first expert's weights
  int64_t count, stride;  // bytes from one expert's to the next one's
};

View input_view(const char* op, const Handle& input) {
  const View x = view(op, "input", input.get());
  if (x.dim != 2 && x.dim != 3)
    fail(op, "input has shape ", x.shape(), "; expected [T, in_features] or [T, top_k, in_features]");
  return x;
}

// Everything but the weight: checks input and ids, makes the output, multiplies.
Handle multiply(const char* op, const View& x, const Experts& experts, const Handle& expert_ids) {
  Problem p = experts.problem;
  p.x_type = p.y_type = require_float(op, "input", x.dtype);
  const Indices ids(op, "expert_ids", expert_ids);
  const View& i = ids.view();
  if (i.dim != 2 || i.sizes[0] != x.sizes[0] || (x.dim == 3 && i.sizes[1] != x.sizes[1]))
    fail(op, "expert_ids has shape ", i.shape(), "; expected [", x.sizes[0], ", ",
         x.dim == 3 ? std::to_string(x.sizes[1]) : "top_k", "] to match input's shape, ", x.shape());
  ids.check_below(experts.count, "experts");

  const int64_t top_k = i.sizes[1], sizes[3] = {i.sizes[0], top_k, p.n};
  Handle out = empty(3, sizes, x.dtype);
  p.y = data(out);
  p.ldy = p.n;
  p.exact = exact();
  if (ids.count() == 0 || p.n == 0) return out;
  if (p.k == 0) {
    std::memset(p.y, 0, static_cast<size_t>(ids.count() * p.n * element_size(p.y_type)));
    return out;
  }
  Handle x_copy;
  p.x = x.data;
  if (!x.one_row_step(&p.ldx)) {
    p.x = contiguous_data(x, x_copy);
    p.ldx = p.k;
  }

  // Rows of y by expert (a counting sort), and the rows of x that they come from.
  std::vector<int64_t> first(static_cast<size_t>(experts.count) + 1), x_rows(static_cast<size_t>(ids.count())),
      y_rows(x_rows.size());
  for (int64_t at = 0; at < ids.count(); ++at) ++first[static_cast<size_t>(ids[at])];
  int64_t end = 0;
  for (int64_t& f : first) f = std::exchange(end, end + f);  // counts -> where each expert begins
  for (int64_t at = 0; at < ids.count(); ++at) {
    const auto slot = static_cast<size_t>(first[static_cast<size_t>(ids[at])]++);  // and now: where it ends
    y_rows[slot] = at;
    x_rows[slot] = x.dim == 3 ? at : at / top_k;
  }

  std::vector<Job> jobs;
  jobs.reserve(static_cast<size_t>(std::min(experts.count, ids.count())));
  constexpr size_t kNone = ~size_t{0};
  std::vector<size_t> single(static_cast<size_t>(x.rows()), kNone);  // by row of x: the job that prepares it alone
  int64_t batch_rows = 0, begin = 0;
  for (int64_t e = 0; e < experts.count; ++e) {
    const int64_t stop = first[static_cast<size_t>(e)], height = begin < stop ? chunk_rows(stop - begin) : 0;
    p.w = static_cast<const char*>(experts.problem.w) + e * experts.stride;
    for (; begin < stop; begin += p.m) {
      p.m = std::min(height, stop - begin);
      if (batch_rows > 0 && (batch_rows + p.m) * p.k > kBatchElements) {
        run(jobs);
        jobs.clear();
        std::fill(single.begin(), single.end(), kNone);
        batch_rows = 0;
      }
      p.x_rows = x_rows.data() + begin;
      p.y_rows = y_rows.data() + begin;
      size_t source = jobs.size();
      if (p.m == 1) {
        size_t& prepared = single[static_cast<size_t>(*p.x_rows)];
        source = prepared = prepared == kNone ? source : prepared;
      }
      jobs.push_back({p, {}, source, 0});
      batch_rows += p.m;
    }
  }
  run(jobs);
  return out;
}

}  // namespace

void linear_experts(StableIValue* stack, uint64_t, uint64_t) {
  const char* op = "linear_experts";
  const Handle input = tensor_argument(stack[0]), weight = tensor_argument(stack[1]);
  const Handle expert_ids = tensor_argument(stack[2]);
  const auto weight_type = torch::stable::detail::to<std::optional<int64_t>>(stack[3]);

  const View x = input_view(op, input), w = view(op, "weight", weight.get());
  const Rows r = expert_rows(op, w, weight_type);
  check_in_features(op, x, w, r, "E, ");
  const Problem p = problem_of(r);
  stack[0] = result(multiply(op, x, {p, w.sizes[0], r.expert_stride}, expert_ids));
}

void linear_experts_packed(StableIValue* stack, uint64_t, uint64_t) {
  const char* op = "linear_experts_packed";
  const Handle input = tensor_argument(stack[0]), weight = tensor_argument(stack[1]);
  const Handle expert_ids = tensor_argument(stack[2]);
  const auto n = torch::stable::detail::to<int64_t>(stack[3]), k = torch::stable::detail::to<int64_t>(stack[4]);
  const FormatInfo& f = packed_format(op, torch::stable::detail::to<int64_t>(stack[5]));

  const View x = input_view(op, input), w = view(op, "weight", weight.get());
  check_packed_input(op, x, k);
  check_packed(op, w, f, n, k, 1);
  Problem p{};
  p.n = n;
  p.k = k;
  p.w_type = f.type;
  p.packed = true;
  Handle copy;
  // Experts may lie apart, as a slice of more of them does; their panels may not.
  const bool in_place = w.strides[2] == 1 && w.strides[1] == w.sizes[2] && w.strides[0] % kPackedAlignment == 0 &&
                        reinterpret_cast<uintptr_t>(w.data) % kPackedAlignment == 0;
  p.w = in_place ? w.data : contiguous_data(w, copy, kPackedAlignment);
  stack[0] = result(multiply(op, x, {p, w.sizes[0], in_place ? w.strides[0] : w.sizes[1] * w.sizes[2]}, expert_ids));
}

}  // namespace ktlinear::ops
