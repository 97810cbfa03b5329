#include "kernels/cuda/attention.h"
#include "kernels/cuda/attention_tiles.cuh"

namespace poise::cuda {

void attend_float16(const Attention& op, cudaStream_t stream) {
  if (!attend_prompts_float16(op, stream)) {
    attend_with_tiles<__half, false>(op, stream);
  }
}

}  // namespace poise::cuda
