#pragma once
// The operations of kernels/kernels.h on a CUDA stream. Each call queues and returns: nothing is
// allocated, nothing waited for. Pointers are to device memory, the structs are copied. A row's
// output has the same bits whatever rows, sequences and blocks stand beside it in a launch. Matrices
// are row-major. The caller's thread must have the device current. Gemm: kernels/cuda/gemm.h.

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/kernels.h"

namespace poise::cuda {

void embed_tokens(const EmbedTokens& op, cudaStream_t stream);
void add_positions(const AddPositions& op, cudaStream_t stream);
void layer_norm(const LayerNorm& op, cudaStream_t stream);
void convert(const Convert& op, cudaStream_t stream);
void scatter_rows(const ScatterRows& op, cudaStream_t stream);
void attention(const Attention& op, cudaStream_t stream);
void sample_tokens(const SampleTokens& op, cudaStream_t stream);

// inout[r, c] = residual[r, c] + bias[c], both with row stride `stride`. `residual` may be inout
// itself, or null: 0; `bias` is of `dtype`, or null: 0.
void add_bias(float* inout, const float* residual, const void* bias, DType dtype, std::int64_t rows,
              std::int64_t cols, std::int64_t stride, cudaStream_t cuda_stream);

// inout[r, c] = epilogue(inout[r, c])
void activate(const Rows& inout, std::int64_t rows, std::int64_t cols, Epilogue epilogue,
              cudaStream_t stream);

}  // namespace poise::cuda
