#include "kernels/cuda/attention.h"
#include "kernels/cuda/prompts/attention_prompts.cuh"

namespace poise::cuda {

bool attend_prompts_bfloat16(const Attention& op, cudaStream_t stream) {
  return attend_as_prompts<__nv_bfloat16>(op, stream);
}

}  // namespace poise::cuda
