#pragma once
// Gemm on tensor cores through cuBLASLt. For every weight (its shape and types) one algorithm is
// chosen, once, and serves any number of rows: without a split of the sum and without atomics, so
// that a row's bits depend on that row alone, not on the rows beside it, and a key made again from
// an ACT block equals the one made when its token was new (README section 8). The choice is the
// heuristic's for `kChoiceRows` rows: many, because that is where time goes.
//
// float16 and bfloat16 sum in float32; float32 is true float32 (no tf32). What cuBLASLt cannot fuse
// into its epilogue (a residual with a bias, GELU) is a kernel before or after it. Owns its handle
// and workspace; one thread, the device's, uses it.

#include <cuda_runtime_api.h>

#include <compare>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "common/units.h"
#include "kernels/cuda/cublas_lt.h"
#include "kernels/kernels.h"

namespace poise::cuda {

class Gemms {
 public:
  static constexpr Bytes kWorkspace = kMiB * 32;

  Gemms();
  ~Gemms();
  Gemms(const Gemms&) = delete;
  Gemms& operator=(const Gemms&) = delete;

  void run(const Gemm& op, cudaStream_t stream);

  // For benches: all algorithms that would serve such a product, the chosen one first; and a run with
  // another.
  std::vector<lt::Algo> algorithms(const Gemm& op);
  void run_with(const Gemm& op, const lt::Algo& algo, cudaStream_t stream);

  std::size_t version() const { return lt_.get_version(); }

 private:
  // All that an algorithm may depend on, the number of rows left out.
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
  Plan& plan_for(const Key& key);
  std::unique_ptr<Plan> make_plan(const Key& key) const;
  std::vector<lt::Algo> choices(Plan& plan, const Key& key) const;
  bool suits(Plan& plan, const lt::Algo& algo) const;

  const lt::Functions& lt_;
  lt::Handle handle_ = nullptr;
  void* workspace_ = nullptr;
  std::map<Key, std::unique_ptr<Plan>> plans_;
};

}  // namespace poise::cuda
