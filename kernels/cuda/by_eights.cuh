#pragma once
// Operations that take each number of a (rows, cols) array by itself: eight neighbouring columns of
// a row to a thread, kElementsEach columns of one row to a block of threads.

#include <cstdint>

#include "common/units.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/numbers.cuh"

namespace poise::cuda {

inline constexpr int kThreadsEach = 256;
inline constexpr std::int64_t kElementsEach = kThreadsEach * kEight;

// Fn has `__device__ void operator()(row, column, count) const`: columns [column, column + count) of
// a row, count in 1 .. 8.
template <typename Fn>
__global__ void __launch_bounds__(kThreadsEach)
    by_eights_kernel(std::int64_t cols, unsigned parts, Fn fn) {
  const std::int64_t row = blockIdx.x / parts;
  const std::int64_t column = (blockIdx.x % parts) * kElementsEach + threadIdx.x * kEight;
  if (column < cols) {
    const std::int64_t left = cols - column;
    fn(row, column, left < kEight ? static_cast<int>(left) : kEight);
  }
}

template <typename Fn>
void by_eights(const char* name, std::int64_t rows, std::int64_t cols, cudaStream_t stream, Fn fn) {
  if (rows > 0 && cols > 0) {
    const std::int64_t parts = ceil_div(cols, kElementsEach);
    launch(name, &by_eights_kernel<Fn>, {.blocks = rows * parts, .threads = kThreadsEach}, stream,
           cols, static_cast<unsigned>(parts), fn);
  }
}

}  // namespace poise::cuda
