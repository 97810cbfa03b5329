#pragma once
// Attention's variants, each in a file of its own so that they compile in parallel. Each has the
// REQUIRES of `attention` (kernels_cuda.h).

#include <cuda_runtime.h>

#include "kernels/kernels.h"

namespace poise::cuda {

// On tensor cores. REQUIRES: head_dim a multiple of 8, slots at multiples of 16 bytes.
void attend_float16(const Attention& op, cudaStream_t stream);
void attend_bfloat16(const Attention& op, cudaStream_t stream);
// Many rows on a GPU of compute capability 9.0 (prompts/); false where it was not for this kernel.
bool attend_prompts_float16(const Attention& op, cudaStream_t stream);
bool attend_prompts_bfloat16(const Attention& op, cudaStream_t stream);
// The same over quantised blocks.
void attend_codes_float16(const Attention& op, cudaStream_t stream);
void attend_codes_bfloat16(const Attention& op, cudaStream_t stream);
// Any type and width, plain or quantised blocks, in float32 throughout.
void attend_plainly(const Attention& op, cudaStream_t stream);

}  // namespace poise::cuda
