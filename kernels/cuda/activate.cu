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

// x / (1 + exp(-x))
__device__ float silu(float x) { return x / (1.0f + expf(-x)); }

__device__ float activated(Epilogue epilogue, float x) {
  switch (epilogue) {
    case Epilogue::none:
      return x;
    case Epilogue::relu:
      return relu(x);
    case Epilogue::gelu:
      return gelu(x);
    case Epilogue::gelu_tanh:
      return gelu_tanh(x);
    case Epilogue::silu:
      return silu(x);
  }
  return x;
}

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
      values.x[i] = activated(epilogue, values.x[i]);
    }
    store_eight(at, values, count, eights);
  }
};

// A thread reads its gates before it writes there, so `out` may be the gates' own place.
template <typename In, typename Out>
struct Gate {
  Out* out;  // (rows, dim), rows `out_stride` apart
  const In*
      in;  // (rows, 2 · dim), rows `in_stride` apart: gates, then what they are multiplied with
  std::int64_t out_stride, in_stride, dim;
  Epilogue activation;
  bool out_eights, gate_eights, up_eights;

  __device__ void operator()(std::int64_t row, std::int64_t column, int count) const {
    const In* gates = in + row * in_stride + column;
    Eight values = load_eight(gates, count, gate_eights);
    const Eight up = load_eight(gates + dim, count, up_eights);
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      values.x[i] = activated(activation, values.x[i]) * up.x[i];
    }
    store_eight(out + row * out_stride + column, values, count, out_eights);
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

void gated_activation(const GatedActivation& op, cudaStream_t stream) {
  with_type(op.in.dtype, [&](auto* in_type) {
    using In = std::remove_pointer_t<decltype(in_type)>;
    const auto* in = static_cast<const In*>(op.in.data);
    with_type(op.out.dtype, [&](auto* out_type) {
      using Out = std::remove_pointer_t<decltype(out_type)>;
      auto* out = static_cast<Out*>(op.out.data);
      by_eights("gate", op.rows, op.dim, stream,
                Gate<In, Out>{.out = out,
                              .in = in,
                              .out_stride = op.out.stride,
                              .in_stride = op.in.stride,
                              .dim = op.dim,
                              .activation = op.activation,
                              .out_eights = in_eights(out, op.out.stride),
                              .gate_eights = in_eights(in, op.in.stride),
                              .up_eights = in_eights(in + op.dim, op.in.stride)});
    });
  });
}

}  // namespace poise::cuda
