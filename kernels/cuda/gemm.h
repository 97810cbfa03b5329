#pragma once
// Gemm on tensor cores through cuBLASLt. For every weight (its shape and types) one algorithm for any
// number of rows is chosen once. It has no split of the sum and no atomics, so a row's bits depend on
// that row alone, and a key computed again from an ACT block equals the one computed when its token was
// new (common/README section 8). The choice is the heuristic's for `kChoiceRows` rows: products of many
// rows take most of the time.
//
// That algorithm's tiles are large. Few rows make too few thread blocks to read a weight at the memory's
// speed, so another algorithm may serve up to each of `kFewRows` rows. At a product's first use, with
// any number of rows, Gemms times the heuristic's first algorithms for few rows and for more, and our
// own kernel for few rows (few_rows.h), with this weight. The fastest that gives the same bits on random
// rows serves from then on. The choice may differ from start to start; the bits do not. All products
// together take some tenths of a second for this, within a run's first iteration and never later.
//
// float16 and bfloat16 sum in float32; float32 is true float32 (no tf32). What cuBLASLt cannot fuse
// into its epilogue (a residual with a bias, GELU) is a kernel before or after it. A Gemms owns its
// handle and workspace; one thread, the device's, uses it.

#include <cuda_runtime_api.h>

#include <array>
#include <compare>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "common/units.h"
#include "kernels/cuda/cublas_lt.h"
#include "kernels/cuda/few_rows.h"
#include "kernels/kernels.h"

namespace poise::cuda {

// What computes a product: one of cuBLASLt's algorithms or, for up to kMaxFewRows rows, our kernel.
struct Algorithm {
  lt::Algo lt{};
  bool few_rows = false;
};

class Gemms {
 public:
  static constexpr Bytes kWorkspace = kMiB * 32;
  static constexpr std::array<std::int64_t, 3> kFewRows{32, 64, 256};

  Gemms();
  ~Gemms();
  Gemms(const Gemms&) = delete;
  Gemms& operator=(const Gemms&) = delete;

  void run(const Gemm& op, cudaStream_t stream);

  // For benches and tests: the algorithms that can serve such a product, either with any number of rows
  // (the one chosen for many rows first) or up to `few`; the one that does serve it; and a run with
  // another one.
  std::vector<Algorithm> algorithms(const Gemm& op, std::optional<std::int64_t> few = std::nullopt);
  const Algorithm& serving(const Gemm& op, cudaStream_t stream);
  void run_with(const Gemm& op, const Algorithm& algorithm, cudaStream_t stream);

  std::size_t version() const { return lt_.get_version(); }

 private:
  // Everything that the choice of an algorithm depends on, except the number of rows.
  struct Key {
    std::int32_t outputs, inputs;
    DType in, weight, out;
    std::int64_t in_stride, out_stride;
    lt::EpilogueKind epilogue;
    bool adds;  // out = … + out
    auto operator<=>(const Key&) const = default;
  };
  struct Plan;

  static Key key_of(const Gemm& op);
  static FewRows few_rows_of(const Key& key, const void* weight, const void* bias, const void* in,
                             void* out, std::int64_t rows);
  Plan& plan_for(const Key& key);
  std::unique_ptr<Plan> make_plan(const Key& key) const;
  std::vector<Algorithm> choices(Plan& plan, const Key& key, std::optional<std::int64_t> few) const;
  std::vector<Algorithm> named_for_few(Plan& plan, const Key& key, std::int64_t few) const;
  bool suits(Plan& plan, const lt::Algo& algo, std::optional<std::int64_t> few) const;
  std::optional<std::size_t> workspace_of(Plan& plan, const lt::Algo& algo,
                                          std::uint64_t rows) const;
  const Algorithm& serving(Plan& plan, const Key& key, const Gemm& op, cudaStream_t stream);
  void run_with(Plan& plan, const Key& key, const Gemm& op, const Algorithm& algorithm,
                cudaStream_t stream);
  Algorithm choose_for_few(Plan& plan, const Key& key, const Gemm& op, std::int64_t few,
                           cudaStream_t stream);
  void multiply(Plan& plan, const Key& key, const lt::Algo& algo, const void* weight,
                const void* in, void* out, std::int64_t rows, cudaStream_t stream);

  const lt::Functions& lt_;
  lt::Handle handle_ = nullptr;
  void* workspace_ = nullptr;
  std::map<Key, std::unique_ptr<Plan>> plans_;
};

}  // namespace poise::cuda
