#pragma once
// A product of few rows, which takes as long as its weight takes to be read. cuBLASLt's algorithms read
// one at 50 to 90 % of the memory's speed: their tiles are of 64 outputs and more, and where no sum may be
// split, a weight of few outputs and many inputs makes few thread blocks. Here a block takes 32 or 64
// outputs, one warp to sixteen, and other warps keep under way as much as a multiprocessor's shared
// memory holds.
//
// Bits: sixteen inputs at a time, in order, are one tensor core product, added to a float32 sum in
// the same instruction. cuBLASLt's algorithms without a split do so too, by all their tiles (Gemms asks
// before it relies on that, trial.h). Bias, residual and ReLU follow as theirs do.

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/dtype.h"

namespace poise::cuda {

inline constexpr std::int64_t kMaxFewRows = 64;

// out[r, n] = epilogue(Σ_k in[r, k] · weight[n, k] + bias[n]), or, where it `adds` to float32 rows,
// Σ_k in[r, k] · weight[n, k] + (bias[n] + out[r, n]).
struct FewRows {
  void* out;
  bool wide;  // float32, else `dtype`
  std::int64_t out_stride;
  const void* in;
  std::int64_t in_stride;
  const void* weight;  // (outputs, inputs)
  std::int32_t outputs, inputs;
  const void* bias;  // (outputs) of `dtype`, or null
  DType dtype;       // of in, weight and bias
  std::int64_t rows;
  bool relu, adds;
};

// Whether it can be computed so: 16-bit types, rows of 16 bytes' multiples at such addresses.
bool serves(const FewRows& op);
// REQUIRES: serves(op). Asynchronous; one kernel, no workspace.
void multiply_few_rows(const FewRows& op, cudaStream_t stream);

}  // namespace poise::cuda
