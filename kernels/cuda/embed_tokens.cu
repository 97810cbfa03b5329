#include "kernels/cuda/by_eights.cuh"
#include "kernels/cuda/kernels_cuda.h"

namespace poise::cuda {
namespace {

template <typename T>
struct EmbedRow {
  float* out;                  // (rows, cols)
  const std::int32_t* tokens;  // (rows)
  const T* table;              // (vocab_size, cols)
  std::int64_t cols;
  bool from_eights, to_eights;

  __device__ void operator()(std::int64_t row, std::int64_t column, int count) const {
    const T* from = table + tokens[row] * cols + column;
    store_eight(out + row * cols + column, load_eight(from, count, from_eights), count, to_eights);
  }
};

}  // namespace

void embed_tokens(const EmbedTokens& op, cudaStream_t stream) {
  with_type(op.table.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const auto* table = static_cast<const T*>(op.table.data);
    const std::int64_t cols = op.table.cols;
    by_eights("embed tokens", op.rows, cols, stream,
              EmbedRow<T>{.out = op.out,
                          .tokens = op.tokens,
                          .table = table,
                          .cols = cols,
                          .from_eights = in_eights(table, cols),
                          .to_eights = in_eights(op.out, cols)});
  });
}

}  // namespace poise::cuda
