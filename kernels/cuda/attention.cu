#include "kernels/cuda/attention.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/kernels_cuda.h"

namespace poise::cuda {

void attention(const Attention& op, cudaStream_t stream) {
  if (op.sequence_count <= 0 || op.max_new_tokens <= 0) {
    return;
  }
  require(op.head_dim >= 1 && op.head_dim <= 256, "a head is 1 to 256 wide");
  require(op.kv_heads >= 1 && op.heads % op.kv_heads == 0,
          "query heads share key-value heads evenly");
  require(op.row_dtype == op.dtype, "queries and outputs are of the stored type");
  if (op.dtype == DType::float32 || op.head_dim % 8 != 0) {
    attend_plainly(op, stream);
  } else if (op.dtype == DType::float16) {
    (op.format == KvFormat::plain ? attend_float16 : attend_codes_float16)(op, stream);
  } else {
    (op.format == KvFormat::plain ? attend_bfloat16 : attend_codes_bfloat16)(op, stream);
  }
}

}  // namespace poise::cuda
