#include "kernels/cuda/attention.h"
#include "kernels/cuda/prompts/attention_prompts.cuh"

namespace poise::cuda {

bool attend_prompts_float16(const Attention& op, cudaStream_t stream) {
  return attend_as_prompts<__half>(op, stream);
}

}  // namespace poise::cuda
