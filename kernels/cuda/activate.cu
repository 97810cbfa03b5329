#include "kernels/cuda/by_eights.cuh"
#include "kernels/cuda/kernels_cuda.h"

namespace poise::cuda {
namespace {

// x·Φ(x), torch's GELU(approximate='none'). By erfc, which keeps its precision in the far tail; where
// the tail is 0 so is the product, at minus infinity too.
__device__ float gelu(float x) {
  const float share = 0.5f * erfcf(x * -0.70710678118654752f);
  return share == 0.0f ? 0.0f : x * share;
}

// x/2 · (1 + tanh(√(2/π)·(x + 0.044715·x³))) = x / (1 + exp(-2·√(2/π)·(x + 0.044715·x³)))
__device__ float gelu_tanh(float x) {
  const float cubic = fmaf(0.044715f * x * x, x, x);
  return x / (1.0f + expf(-1.5957691216057308f * cubic));
}

__device__ float relu(float x) { return x < 0.0f ? 0.0f : x; }  // not a number stays so

template <typename T>
struct Activate {
  T* inout;  // (rows, cols), rows `stride` apart
  std::int64_t stride;
  Epilogue epilogue;
  bool eights;

  __device__ void operator()(std::int64_t row, std::int64_t column, int count) const {
    T* at = inout + row * stride + column;
    Eight values = load_eight(at, count, eights);
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      const float x = values.x[i];
      values.x[i] = epilogue == Epilogue::relu   ? relu(x)
                    : epilogue == Epilogue::gelu ? gelu(x)
                                                 : gelu_tanh(x);
    }
    store_eight(at, values, count, eights);
  }
};

}  // namespace

void activate(const Rows& inout, std::int64_t rows, std::int64_t cols, Epilogue epilogue,
              cudaStream_t stream) {
  if (epilogue == Epilogue::none) {
    return;
  }
  with_type(inout.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    auto* data = static_cast<T*>(inout.data);
    by_eights("activate", rows, cols, stream,
              Activate<T>{.inout = data,
                          .stride = inout.stride,
                          .epilogue = epilogue,
                          .eights = in_eights(data, inout.stride)});
  });
}

}  // namespace poise::cuda
