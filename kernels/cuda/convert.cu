#include "kernels/cuda/by_eights.cuh"
#include "kernels/cuda/kernels_cuda.h"

namespace poise::cuda {
namespace {

template <typename T>
struct ConvertRow {
  T* out;  // (rows, dim), rows `stride` apart
  std::int64_t stride;
  const float* in;  // (rows, dim)
  std::int64_t dim;
  bool in_eights, out_eights;

  __device__ void operator()(std::int64_t row, std::int64_t column, int count) const {
    store_eight(out + row * stride + column, load_eight(in + row * dim + column, count, in_eights),
                count, out_eights);
  }
};

}  // namespace

void convert(const Convert& op, cudaStream_t stream) {
  with_type(op.out.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    auto* out = static_cast<T*>(op.out.data);
    by_eights("convert", op.rows, op.dim, stream,
              ConvertRow<T>{.out = out,
                            .stride = op.out.stride,
                            .in = op.in,
                            .dim = op.dim,
                            .in_eights = in_eights(op.in, op.dim),
                            .out_eights = in_eights(out, op.out.stride)});
  });
}

}  // namespace poise::cuda
