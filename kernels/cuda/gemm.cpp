#include "kernels/cuda/gemm.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <optional>
#include <span>
#include <utility>

#include "common/trouble.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/kernels_cuda.h"
#include "kernels/cuda/trial.h"

namespace poise::cuda {
namespace {

constexpr std::uint64_t kChoiceRows = 4096;
// An algorithm must serve all of these. We assume that support is the same between these row counts.
constexpr std::array<std::uint64_t, 6> kRowsServed{1, 7, 16, 129, 1024, 8192};
constexpr int kCandidates = 64;
constexpr std::size_t kTrials = 8;       // of algorithms for few rows, and of those for many
constexpr double kWorthChoosing = 0.97;  // of the time of the algorithm for many rows
constexpr Seconds kWorthTrials{15e-6};   // of it; what takes less is mostly its start

cudaDataType_t data_type(DType type) {
  switch (type) {
    case DType::float32:
      return CUDA_R_32F;
    case DType::float16:
      return CUDA_R_16F;
    case DType::bfloat16:
      return CUDA_R_16BF;
  }
  return CUDA_R_32F;
}

// What every row of a matrix, and so every part of it that a Gemm is given, is aligned to.
std::uint32_t row_alignment(DType type, std::int64_t stride) {
  const std::int64_t bytes = stride * size_of(type).n;
  return static_cast<std::uint32_t>(std::min<std::int64_t>(bytes & -bytes, 256));
}

bool has(lt::EpilogueKind epilogue, lt::EpilogueKind part) { return (epilogue & part) != 0; }

lt::EpilogueKind epilogue_kind(bool bias, bool relu) {
  if (bias) {
    return relu ? lt::kEpilogueReluBias : lt::kEpilogueBias;
  }
  return relu ? lt::kEpilogueRelu : lt::kEpilogueDefault;
}

}  // namespace

// cuBLAS's matrices are column-major: ours, row-major, is its transpose. outᵀ (outputs, rows) =
// weight (as its A, transposed) · inᵀ.
struct Gemms::Plan {
  const lt::Functions& lt;
  lt::MatmulDesc desc = nullptr;
  lt::MatrixLayout weight = nullptr, in = nullptr, out = nullptr;
  Algorithm many;
  std::array<std::optional<Algorithm>, kFewRows.size()> few;  // once they are known
  std::uint64_t rows = 0;                                     // that the layouts say

  explicit Plan(const lt::Functions& functions) : lt(functions) {}
  ~Plan() {
    for (const lt::MatrixLayout layout : {weight, in, out}) {
      if (layout != nullptr) {
        lt.layout_destroy(layout);
      }
    }
    if (desc != nullptr) {
      lt.desc_destroy(desc);
    }
  }
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  template <typename Value>
  void set(lt::MatmulDescAttribute attribute, const Value& value) {
    lt::lt_check(lt.desc_set(desc, attribute, &value, sizeof value), "describing a product");
  }
  void set_rows(std::uint64_t count) {
    if (count != rows) {
      rows = count;
      lt::lt_check(lt.layout_set(in, lt::kLayoutCols, &rows, sizeof rows), "naming the rows");
      lt::lt_check(lt.layout_set(out, lt::kLayoutCols, &rows, sizeof rows), "naming the rows");
    }
  }
};

// What our kernel is given. A bias that cuBLASLt cannot add within the product, it can.
FewRows Gemms::few_rows_of(const Key& key, const void* weight, const void* bias, const void* in,
                           void* out, std::int64_t rows) {
  return {.out = out,
          .wide = key.out == DType::float32,
          .out_stride = key.out_stride,
          .in = in,
          .in_stride = key.in_stride,
          .weight = weight,
          .outputs = key.outputs,
          .inputs = key.inputs,
          .bias = bias,
          .dtype = key.weight,
          .rows = rows,
          .relu = has(key.epilogue, lt::kEpilogueRelu),
          .adds = key.adds};
}

Gemms::Gemms() : lt_(lt::functions()) {
  lt::lt_check(lt_.create(&handle_), "starting");
  cuda_check(cudaMalloc(&workspace_, static_cast<std::size_t>(kWorkspace.n)), "cuBLAS's workspace");
}

Gemms::~Gemms() {
  plans_.clear();
  static_cast<void>(cudaFree(workspace_));
  lt_.destroy(handle_);
}

// A bias of 16 bits cannot be added to float32 outputs within the product, nor one beside a
// residual: it goes there first, and the product adds to it.
Gemms::Key Gemms::key_of(const Gemm& op) {
  check(op.in.dtype == op.weight.dtype, "a product's factors are of one type");
  const bool wide_out = op.out.dtype == DType::float32;
  const bool mixed = wide_out && op.weight.dtype != DType::float32;
  const bool adds = op.residual != nullptr;
  check(!adds || (wide_out && op.epilogue == Epilogue::none),
        "a residual is float32, and nothing follows it");
  const bool bias_before = op.bias != nullptr && (mixed || adds);
  return {.outputs = op.weight.rows,
          .inputs = op.weight.cols,
          .in = op.in.dtype,
          .weight = op.weight.dtype,
          .out = op.out.dtype,
          .in_stride = op.in.stride,
          .out_stride = op.out.stride,
          .epilogue = epilogue_kind(op.bias != nullptr && !bias_before,
                                    op.epilogue == Epilogue::relu && !bias_before),
          .adds = adds || bias_before};
}

void Gemms::run(const Gemm& op, cudaStream_t stream) {
  require(!op.weight.packed.is_packed(), "packed weights are unpacked before they are multiplied");
  if (op.rows > 0) {
    const Key key = key_of(op);
    Plan& plan = plan_for(key);
    run_with(plan, key, op, serving(plan, key, op, stream), stream);
  }
}

const Algorithm& Gemms::serving(const Gemm& op, cudaStream_t stream) {
  const Key key = key_of(op);
  return serving(plan_for(key), key, op, stream);
}

void Gemms::run_with(const Gemm& op, const Algorithm& algorithm, cudaStream_t stream) {
  const Key key = key_of(op);
  run_with(plan_for(key), key, op, algorithm, stream);
}

const Algorithm& Gemms::serving(Plan& plan, const Key& key, const Gemm& op, cudaStream_t stream) {
  for (std::size_t i = 0; i < kFewRows.size(); ++i) {
    if (!plan.few[i]) {
      plan.few[i] = choose_for_few(plan, key, op, kFewRows[i], stream);
    }
  }
  for (std::size_t i = 0; i < kFewRows.size(); ++i) {
    if (op.rows <= kFewRows[i]) {
      return *plan.few[i];
    }
  }
  return plan.many;
}

void Gemms::run_with(Plan& plan, const Key& key, const Gemm& op, const Algorithm& algorithm,
                     cudaStream_t stream) {
  const bool relu_within = has(key.epilogue, lt::kEpilogueRelu);
  if (algorithm.few_rows) {
    if (key.adds && op.residual != op.out.data) {
      add_bias(static_cast<float*>(op.out.data), op.residual, nullptr, op.weight.dtype, op.rows,
               op.weight.rows, op.out.stride, stream);
    }
    multiply_few_rows(few_rows_of(key, op.weight.data, op.bias, op.in.data, op.out.data, op.rows),
                      stream);
  } else {
    const bool bias_within = has(key.epilogue, lt::kEpilogueBias);
    if (key.adds && ((op.bias != nullptr && !bias_within) || op.residual != op.out.data)) {
      add_bias(static_cast<float*>(op.out.data), op.residual, op.bias, op.weight.dtype, op.rows,
               op.weight.rows, op.out.stride, stream);
    }
    if (bias_within) {
      plan.set(lt::kBiasPointer, op.bias);
    }
    multiply(plan, key, algorithm.lt, op.weight.data, op.in.data, op.out.data, op.rows, stream);
  }
  if (op.epilogue != Epilogue::none && !relu_within) {
    activate(op.out, op.rows, op.weight.rows, op.epilogue, stream);
  }
}

void Gemms::multiply(Plan& plan, const Key& key, const lt::Algo& algo, const void* weight,
                     const void* in, void* out, std::int64_t rows, cudaStream_t stream) {
  plan.set_rows(static_cast<std::uint64_t>(rows));
  const float alpha = 1.0f;
  const float beta = key.adds ? 1.0f : 0.0f;
  lt::lt_check(
      lt_.matmul(handle_, plan.desc, &alpha, weight, plan.weight, in, plan.in, &beta, out, plan.out,
                 out, plan.out, &algo, workspace_, static_cast<std::size_t>(kWorkspace.n), stream),
      "a product");
}

// The heuristic's first algorithms for this number of rows, for more rows and for many, each once. The
// trials' rows lie in the workspace, so no algorithm that needs workspace takes part.
std::vector<Algorithm> Gemms::named_for_few(Plan& plan, const Key& key, std::int64_t few) const {
  std::vector<std::optional<std::int64_t>> ask{std::nullopt};
  std::ranges::copy_if(kFewRows, std::back_inserter(ask), [&](auto rows) { return rows >= few; });
  std::vector<Algorithm> named;
  for (const auto& rows : ask) {
    const std::vector<Algorithm> some = choices(plan, key, rows);
    for (const Algorithm& one : std::span(some).first(std::min(some.size(), kTrials))) {
      const bool is_new = std::ranges::none_of(named, [&](const Algorithm& other) {
        return std::ranges::equal(one.lt.data, other.lt.data);
      });
      if (is_new && workspace_of(plan, one.lt, static_cast<std::uint64_t>(few)) == 0) {
        named.push_back(one);
      }
    }
  }
  return named;
}

Algorithm Gemms::choose_for_few(Plan& plan, const Key& key, const Gemm& op, std::int64_t few,
                                cudaStream_t stream) {
  const Trial trial{.rows = few,
                    .in_dtype = key.in,
                    .in_stride = key.in_stride,
                    .out_row = {size_of(key.out).n * key.out_stride},
                    .adds = key.adds,
                    .scratch = workspace_,
                    .scratch_bytes = kWorkspace,
                    .stream = stream};
  const auto rows = static_cast<std::uint64_t>(few);
  if (!trial.fits() || workspace_of(plan, plan.many.lt, rows) != 0) {
    return plan.many;
  }
  const bool bias_within = has(key.epilogue, lt::kEpilogueBias);
  if (bias_within) {
    plan.set(lt::kBiasPointer, op.bias);
  }
  const auto ours = [&](const void* in, void* out) {
    return few_rows_of(key, op.weight.data, bias_within ? op.bias : nullptr, in, out, few);
  };
  const auto with = [&](const Algorithm& algorithm) -> Trial::Way {
    return [&plan, &key, &op, &algorithm, &ours, few, stream, this](const void* in, void* out) {
      if (algorithm.few_rows) {
        multiply_few_rows(ours(in, out), stream);
      } else {
        multiply(plan, key, algorithm.lt, op.weight.data, in, out, few, stream);
      }
    };
  };
  const Seconds of_many = time_of(trial, with(plan.many));
  if (of_many < kWorthTrials) {
    return plan.many;
  }
  std::vector<Algorithm> candidates = named_for_few(plan, key, few);
  if (serves(ours(workspace_, workspace_))) {
    candidates.push_back({.few_rows = true});
  }
  const Seconds allowed = of_many * kWorthChoosing;
  std::vector<std::pair<Seconds, const Algorithm*>> faster;
  for (const Algorithm& algorithm : candidates) {
    const Seconds time = time_of(trial, with(algorithm));
    if (time < allowed) {
      faster.emplace_back(time, &algorithm);
    }
  }
  std::ranges::sort(faster, {}, &std::pair<Seconds, const Algorithm*>::first);
  const auto found = std::ranges::find_if(faster, [&](const auto& one) {
    return same_bits(trial, with(plan.many), with(*one.second));
  });
  return found != faster.end() ? *found->second : plan.many;
}

std::vector<Algorithm> Gemms::algorithms(const Gemm& op, std::optional<std::int64_t> few) {
  const Key key = key_of(op);
  return choices(plan_for(key), key, few);
}

Gemms::Plan& Gemms::plan_for(const Key& key) {
  auto& plan = plans_[key];
  if (!plan) {
    plan = make_plan(key);
  }
  return *plan;
}

std::unique_ptr<Gemms::Plan> Gemms::make_plan(const Key& key) const {
  auto plan = std::make_unique<Plan>(lt_);
  const bool full = key.weight == DType::float32;
  lt::lt_check(
      lt_.desc_create(&plan->desc, full ? lt::kCompute32FPedantic : lt::kCompute32F, CUDA_R_32F),
      "describing a product");
  plan->set(lt::kTransA, lt::kOpT);
  plan->set(lt::kTransB, lt::kOpN);
  plan->set(lt::kEpilogue, key.epilogue);
  const bool bias = (key.epilogue & lt::kEpilogueBias) != 0;
  if (bias) {
    plan->set(lt::kBiasDataType, data_type(key.weight));
    plan->set(lt::kBiasPointer, workspace_);  // any aligned address, for the choice
  }
  const auto outputs = static_cast<std::uint64_t>(key.outputs);
  const auto inputs = static_cast<std::uint64_t>(key.inputs);
  const auto layout = [&](lt::MatrixLayout* made, DType type, std::uint64_t rows,
                          std::uint64_t cols, std::int64_t ld) {
    lt::lt_check(lt_.layout_create(made, data_type(type), rows, cols, ld), "describing a matrix");
  };
  layout(&plan->weight, key.weight, inputs, outputs, key.inputs);
  layout(&plan->in, key.in, inputs, kChoiceRows, key.in_stride);
  layout(&plan->out, key.out, outputs, kChoiceRows, key.out_stride);
  plan->rows = kChoiceRows;

  const std::vector<Algorithm> served = choices(*plan, key, std::nullopt);
  if (served.empty()) {
    fail(Exit::interrupted,
         "cuBLAS knows no algorithm for a product of ({}, {}) {} that serves any number of rows "
         "alike",
         key.outputs, key.inputs, name_of(key.weight));
  }
  plan->many = served.front();
  return plan;
}

// Algorithms that serve up to `few` rows, or any number, in the heuristic's order for `few` or for
// kChoiceRows rows.
std::vector<Algorithm> Gemms::choices(Plan& plan, const Key& key,
                                      std::optional<std::int64_t> few) const {
  plan.set_rows(few ? static_cast<std::uint64_t>(*few) : kChoiceRows);
  lt::Preference preference = nullptr;
  lt::lt_check(lt_.preference_create(&preference), "choosing an algorithm");
  const auto prefer = [&](lt::PreferenceAttribute attribute, const auto& value) {
    lt::lt_check(lt_.preference_set(preference, attribute, &value, sizeof value),
                 "choosing an algorithm");
  };
  prefer(lt::kMaxWorkspaceBytes, static_cast<std::uint64_t>(kWorkspace.n));
  prefer(lt::kReductionSchemeMask, std::uint32_t{0});
  prefer(lt::kMinAlignmentA, row_alignment(key.weight, key.inputs));
  prefer(lt::kMinAlignmentB, row_alignment(key.in, key.in_stride));
  prefer(lt::kMinAlignmentC, row_alignment(key.out, key.out_stride));
  prefer(lt::kMinAlignmentD, row_alignment(key.out, key.out_stride));
  std::array<lt::Heuristic, kCandidates> candidates{};
  int found = 0;
  const lt::Status status =
      lt_.heuristic(handle_, plan.desc, plan.weight, plan.in, plan.out, plan.out, preference,
                    kCandidates, candidates.data(), &found);
  lt_.preference_destroy(preference);
  std::vector<Algorithm> served;
  for (int i = 0; status == lt::kSuccess && i < found; ++i) {
    const lt::Heuristic& candidate = candidates[static_cast<std::size_t>(i)];
    if (candidate.state == lt::kSuccess && suits(plan, candidate.algo, few)) {
      served.push_back({.lt = candidate.algo});
    }
  }
  return served;
}

bool Gemms::suits(Plan& plan, const lt::Algo& algo, std::optional<std::int64_t> few) const {
  std::int32_t splits = 1;
  std::size_t written = 0;
  if (lt_.algo_get(&algo, lt::kAlgoSplitK, &splits, sizeof splits, &written) == lt::kSuccess &&
      splits > 1) {
    return false;
  }
  const auto serves = [&](std::uint64_t count) {
    const auto needed = workspace_of(plan, algo, count);
    return needed && *needed <= static_cast<std::size_t>(kWorkspace.n);
  };
  const auto most = few ? static_cast<std::uint64_t>(*few) : kRowsServed.back();
  return std::ranges::all_of(kRowsServed,
                             [&](std::uint64_t rows) { return serves(std::min(rows, most)); });
}

// Workspace bytes it needs for this number of rows; nothing if it does not serve them.
std::optional<std::size_t> Gemms::workspace_of(Plan& plan, const lt::Algo& algo,
                                               std::uint64_t rows) const {
  plan.set_rows(rows);
  lt::Heuristic result{};
  const bool serves = lt_.algo_check(handle_, plan.desc, plan.weight, plan.in, plan.out, plan.out,
                                     &algo, &result) == lt::kSuccess;
  return serves ? std::optional(result.workspace) : std::nullopt;
}

}  // namespace poise::cuda
