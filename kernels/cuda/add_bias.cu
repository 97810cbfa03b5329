#include "kernels/cuda/by_eights.cuh"
#include "kernels/cuda/kernels_cuda.h"

namespace poise::cuda {
namespace {

struct AddBias {
  float* inout;           // (rows, cols), rows `stride` apart
  const float* residual;  // the same; may be inout, or null
  Parameter bias;         // (cols)
  std::int64_t stride;
  bool inout_eights, residual_eights, bias_eights;

  __device__ void operator()(std::int64_t row, std::int64_t column, int count) const {
    Eight sum = load_eight(bias, column, count, bias_eights);
    if (residual != nullptr) {
      const Eight before = load_eight(residual + row * stride + column, count, residual_eights);
#pragma unroll
      for (int i = 0; i < kEight; ++i) {
        sum.x[i] += before.x[i];
      }
    }
    store_eight(inout + row * stride + column, sum, count, inout_eights);
  }
};

}  // namespace

void add_bias(float* inout, const float* residual, const void* bias, DType dtype, std::int64_t rows,
              std::int64_t cols, std::int64_t stride, cudaStream_t stream) {
  const Parameter parameter{.data = bias, .dtype = dtype, .absent = 0.0f};
  if (bias == nullptr && residual == inout) {
    return;  // nothing changes
  }
  by_eights("add a bias", rows, cols, stream,
            AddBias{.inout = inout,
                    .residual = residual,
                    .bias = parameter,
                    .stride = stride,
                    .inout_eights = in_eights(inout, stride),
                    .residual_eights = in_eights(residual, stride),
                    .bias_eights = in_eights(parameter)});
}

}  // namespace poise::cuda
