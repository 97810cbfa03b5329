#include "kernels/cuda/attention.h"
#include "kernels/cuda/attention_tiles.cuh"

namespace poise::cuda {

void attend_bfloat16(const Attention& op, cudaStream_t stream) {
  if (!attend_prompts_bfloat16(op, stream)) {
    attend_with_tiles<__nv_bfloat16, false>(op, stream);
  }
}

}  // namespace poise::cuda
