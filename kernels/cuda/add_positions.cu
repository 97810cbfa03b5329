#include "kernels/cuda/by_eights.cuh"
#include "kernels/cuda/kernels_cuda.h"

namespace poise::cuda {
namespace {

template <typename T>
struct AddPosition {
  float* inout;                   // (rows, dim)
  const std::int32_t* positions;  // (rows)
  const T* table;                 // (max_position_embeddings + offset, dim)
  std::int64_t dim, offset;
  bool table_eights, inout_eights;

  __device__ void operator()(std::int64_t row, std::int64_t column, int count) const {
    float* to = inout + row * dim + column;
    Eight sum = load_eight(to, count, inout_eights);
    const Eight position =
        load_eight(table + (positions[row] + offset) * dim + column, count, table_eights);
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      sum.x[i] += position.x[i];
    }
    store_eight(to, sum, count, inout_eights);
  }
};

}  // namespace

void add_positions(const AddPositions& op, cudaStream_t stream) {
  with_type(op.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const auto* table = static_cast<const T*>(op.table);
    by_eights("add positions", op.rows, op.dim, stream,
              AddPosition<T>{.inout = op.inout,
                             .positions = op.positions,
                             .table = table,
                             .dim = op.dim,
                             .offset = op.offset,
                             .table_eights = in_eights(table, op.dim),
                             .inout_eights = in_eights(op.inout, op.dim)});
  });
}

}  // namespace poise::cuda
