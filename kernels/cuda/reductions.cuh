#pragma once
// Sums and maxima over a block of threads, in a fixed order: halves of a warp exchanged until one
// number is left, then the warps' numbers the same way. Every thread gets the result, the same bits.

#include <cstdint>

namespace poise::cuda {

inline constexpr int kWarp = 32;
inline constexpr unsigned kAllLanes = 0xffffffffu;

struct Add {
  template <typename Number>
  __device__ Number operator()(Number a, Number b) const {
    return a + b;
  }
};
struct Larger {
  template <typename Number>
  __device__ Number operator()(Number a, Number b) const {
    return a < b ? b : a;
  }
};

template <typename Number, typename Combine>
__device__ __forceinline__ Number over_warp(Number x, Combine combine) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    x = combine(x, __shfl_xor_sync(kAllLanes, x, distance));
  }
  return x;
}

// For a block of kThreads; `shared`: kThreads / 32 numbers, free again when this returns. All
// threads call it. `nothing` leaves any number as it is.
template <int kThreads, typename Number, typename Combine>
__device__ __forceinline__ Number over_block(Number x, Number nothing, Combine combine,
                                             Number* shared) {
  static_assert(kThreads % kWarp == 0 && kThreads <= kWarp * kWarp);
  constexpr int kWarps = kThreads / kWarp;
  const int lane = threadIdx.x % kWarp;
  x = over_warp(x, combine);
  if (lane == 0) {
    shared[threadIdx.x / kWarp] = x;
  }
  __syncthreads();
  x = over_warp(lane < kWarps ? shared[lane] : nothing, combine);
  __syncthreads();
  return x;
}

}  // namespace poise::cuda
