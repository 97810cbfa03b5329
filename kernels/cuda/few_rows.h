#pragma once
// A product of few rows, which takes as long as reading its weight. cuBLASLt's algorithms read a
// weight at 50 to 90 % of the memory's speed: their tiles have 64 outputs or more, and without a split
// of the sum, a weight of few outputs and many inputs makes few thread blocks. Here a block computes 32
// or 64 outputs, one warp for sixteen of them, and other warps keep as many copies in flight as a
// multiprocessor's shared memory holds.
//
// Bits: sixteen inputs at a time, in order, are one tensor core product, added to a float32 sum in
// the same instruction. cuBLASLt's algorithms without a split do the same with all their tiles (Gemms
// tests this before it relies on it, trial.h). Bias, residual and ReLU follow in cuBLASLt's order.

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/dtype.h"

namespace poise::cuda {

inline constexpr std::int64_t kMaxFewRows = 64;

// out[r, n] = epilogue(Σ_k in[r, k] · weight[n, k] + bias[n]), or, if it `adds` to float32 rows,
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

// Whether this kernel can compute it: 16-bit types, rows whose sizes and addresses are multiples of
// 16 bytes.
bool serves(const FewRows& op);
// REQUIRES: serves(op). Asynchronous; one kernel, no workspace.
void multiply_few_rows(const FewRows& op, cudaStream_t stream);

}  // namespace poise::cuda
