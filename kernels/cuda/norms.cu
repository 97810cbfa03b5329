// LayerNorm and RMSNorm: a block of threads to a row, which stays in registers: mean (LayerNorm's
// alone), then the mean square around it, then out. Thread t sums the eights t, t + 256, … of the row,
// column by column.

#include "common/kernel_limits.h"
#include "kernels/cuda/kernels_cuda.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/reductions.cuh"

namespace poise::cuda {
namespace {

constexpr int kThreads = 256;

struct NormRows {
  Rows out;         // (rows, dim)
  const float* in;  // (rows, dim)
  Parameter weight, bias;
  std::int32_t dim;
  float epsilon;
  bool in_eights, out_eights = false, weight_eights = false, bias_eights = false;

  __device__ void store(std::int64_t row, std::int32_t column, const Eight& values,
                        int count) const {
    const std::int64_t at = row * out.stride + column;
    switch (out.dtype) {
      case DType::float16:
        return store_eight(static_cast<__half*>(out.data) + at, values, count, out_eights);
      case DType::bfloat16:
        return store_eight(static_cast<__nv_bfloat16*>(out.data) + at, values, count, out_eights);
      default:
        return store_eight(static_cast<float*>(out.data) + at, values, count, out_eights);
    }
  }
};

enum class Around { mean, nought };

// kEach · 8 · 256 ≥ dim
template <Around kAround, int kEach>
__global__ void __launch_bounds__(kThreads) norm_kernel(const NormRows op) {
  __shared__ float shared[kThreads / kWarp];
  const std::int64_t row = blockIdx.x;
  const float* in = op.in + row * op.dim;
  const auto dim = static_cast<float>(op.dim);
  const auto column = [](int e) { return (e * kThreads + static_cast<int>(threadIdx.x)) * kEight; };

  Eight values[kEach];
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    if (column(e) < op.dim) {
      values[e] = load_eight(in + column(e), op.dim - column(e), op.in_eights);
    }
  }
  float mean = 0;
  if constexpr (kAround == Around::mean) {
    float sum = 0;
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      if (column(e) < op.dim) {
#pragma unroll
        for (int i = 0; i < kEight; ++i) {
          sum += values[e].x[i];  // zeros behind the end
        }
      }
    }
    mean = over_block<kThreads>(sum, 0.0f, Add(), shared) / dim;
  }

  float squares = 0;
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      if (column(e) + i < op.dim) {
        if constexpr (kAround == Around::mean) {
          values[e].x[i] -= mean;
        }
        squares = fmaf(values[e].x[i], values[e].x[i], squares);
      }
    }
  }
  const float square = over_block<kThreads>(squares, 0.0f, Add(), shared) / dim;
  const float scale = 1.0f / sqrtf(square + op.epsilon);

#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    const std::int32_t left = op.dim - column(e);
    if (left > 0) {
      const Eight weight = load_eight(op.weight, column(e), left, op.weight_eights);
      Eight result;
      if constexpr (kAround == Around::mean) {
        const Eight bias = load_eight(op.bias, column(e), left, op.bias_eights);
#pragma unroll
        for (int i = 0; i < kEight; ++i) {
          result.x[i] = fmaf(values[e].x[i] * scale, weight.x[i], bias.x[i]);
        }
      } else {
#pragma unroll
        for (int i = 0; i < kEight; ++i) {
          result.x[i] = values[e].x[i] * scale * weight.x[i];
        }
      }
      op.store(row, column(e), result, left);
    }
  }
}

template <Around kAround>
void norm(NormRows op, std::int64_t count, cudaStream_t stream) {
  constexpr int kMaxEach = 8;
  static_assert(kMaxNormedRow == kMaxEach * kEight * kThreads);
  require(op.dim >= 1 && op.dim <= kMaxNormedRow, "a normed row is 1 to 16384 wide");
  op.weight_eights = in_eights(op.weight);
  op.bias_eights = in_eights(op.bias);
  with_type(op.out.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    op.out_eights = in_eights(static_cast<const T*>(op.out.data), op.out.stride);
  });
  const Grid grid{.blocks = count, .threads = kThreads};
  const std::int64_t each = ceil_div(op.dim, kEight * kThreads);
  if (each <= 1) {
    launch("norm rows", &norm_kernel<kAround, 1>, grid, stream, op);
  } else if (each <= 2) {
    launch("norm rows", &norm_kernel<kAround, 2>, grid, stream, op);
  } else if (each <= 4) {
    launch("norm rows", &norm_kernel<kAround, 4>, grid, stream, op);
  } else {
    launch("norm rows", &norm_kernel<kAround, kMaxEach>, grid, stream, op);
  }
}

}  // namespace

void layer_norm(const LayerNorm& op, cudaStream_t stream) {
  norm<Around::mean>({.out = op.out,
                      .in = op.in,
                      .weight = {.data = op.weight, .dtype = op.dtype, .absent = 1.0f},
                      .bias = {.data = op.bias, .dtype = op.dtype, .absent = 0.0f},
                      .dim = op.dim,
                      .epsilon = op.epsilon,
                      .in_eights = in_eights(op.in, op.dim)},
                     op.rows, stream);
}

void rms_norm(const RmsNorm& op, cudaStream_t stream) {
  norm<Around::nought>({.out = op.out,
                        .in = op.in,
                        .weight = {.data = op.weight, .dtype = op.dtype, .absent = 1.0f},
                        .bias = {.data = nullptr, .dtype = op.dtype, .absent = 0.0f},
                        .dim = op.dim,
                        .epsilon = op.epsilon,
                        .in_eights = in_eights(op.in, op.dim)},
                       op.rows, stream);
}

}  // namespace poise::cuda
