#pragma once
// The operations of kernels/kernels.h on an NVIDIA GPU (compute capability 8.0 and later); what each
// means is said by its CPU version, and tests/kernels/cuda/ compares the two. Gemm is in gemm.h.
//
// A call checks its arguments (Defect), starts one kernel on `stream` and returns; it allocates
// nothing and waits for nothing. Pointers are device memory, aligned as the device allocates (256
// bytes) where an array starts. Matrices are row-major. Where the stored type has 16 bits, the
// rows between operations may have that type too.
//
// Bits: what is written for a row depends on that row (its sequence's context included) and on the
// model's shape alone: not on the rows beside it, their number, where its blocks lie, or whether its
// prompt came whole, in parts or token by token. Sums have a fixed order, there are no atomics on
// floating point, and masses of probability are whole numbers (sample_tokens.cu).

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>

#include "kernels/kernels.h"

namespace poise::cuda {

void embed_tokens(const EmbedTokens& op, cudaStream_t stream);
void add_positions(const AddPositions& op, cudaStream_t stream);
void layer_norm(const LayerNorm& op, cudaStream_t stream);
void rms_norm(const RmsNorm& op, cudaStream_t stream);
void convert(const Convert& op, cudaStream_t stream);
void gated_activation(const GatedActivation& op, cudaStream_t stream);
// head_dim ≤ 256. Without a norm the bits are the CPU's.
void rotate(const Rotate& op, cudaStream_t stream);
// head_dim ≤ 256. The bits are the CPU's.
void quantize_kv(const QuantizeKv& op, cudaStream_t stream);
// Bound by memory: codes are read once, numbers written once. The bits are the CPU's, the payload of what
// is not a number excepted.
void unpack(const Unpack& op, cudaStream_t stream);
// Rows that are read must not be rows that are written.
void scatter_rows(const ScatterRows& op, cudaStream_t stream);
// One copy of a batch, within device memory, or from pinned host memory that the GPU can address: its threads then read
// over the link, beside what copy engines bring. Destinations overlap neither each other nor a source.
struct DeviceCopy {
  void* to;
  const void* from;
  std::int64_t bytes;
};
// Any number of copies of any size, one kernel for each 160 of them. A copy engine takes microseconds
// for each copy, and tens of microseconds while a product fills the GPU.
void copy_batch(std::span<const DeviceCopy> copies, cudaStream_t stream);
// head_dim ≤ 256; row_dtype is dtype. Launches of a process do not overlap: all are on one stream. Of a
// sequence's last block only the rows of tokens that exist are used. In 16-bit types the values of the
// launch's tokens up to 191 positions behind a row weigh nothing but may be multiplied, and so may those
// before its window that up to 127 rows before it see: they have to be finite, or the row is not (a
// sequence with such values is broken from there on anyway). Over quantised blocks the bits are those of plain blocks that hold the
// numbers their codes stand for.
void attention(const Attention& op, cudaStream_t stream);
// head_dim ≤ 256; row_dtype is dtype. Bits of a row depend on which of its blocks are absorbed too.
void absorbed_attention(const AbsorbedAttention& op, cudaStream_t stream);
void sample_tokens(const SampleTokens& op, cudaStream_t stream);

// inout[r, c] = residual[r, c] + bias[c]; rows of both are `stride` apart. residual: inout itself,
// or null: 0. bias: (cols) of `dtype`, or null: 0. What a Gemm with beta = 1 then adds to.
void add_bias(float* inout, const float* residual, const void* bias, DType dtype, std::int64_t rows,
              std::int64_t cols, std::int64_t stride, cudaStream_t stream);
// inout[r, c] = epilogue(inout[r, c]), for a Gemm that cannot do it itself.
void activate(const Rows& inout, std::int64_t rows, std::int64_t cols, Epilogue epilogue,
              cudaStream_t stream);

}  // namespace poise::cuda
