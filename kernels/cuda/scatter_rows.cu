#include <cuda_runtime.h>

#include <algorithm>

#include "common/units.h"
#include "kernels/cuda/kernels_cuda.h"
#include "kernels/cuda/launch.h"

namespace poise::cuda {
namespace {

constexpr std::int64_t kMaxThreads = 256;

// One row to a block of threads; Word is what a thread moves at once, `words` of them make a row.
template <typename Word>
__global__ void __launch_bounds__(kMaxThreads)
    scatter_kernel(std::byte* out, const std::byte* in, const RowMove* moves, std::int64_t words) {
  const RowMove move = moves[blockIdx.x];
  auto* to = reinterpret_cast<Word*>(out) + move.to * words;
  const auto* from = reinterpret_cast<const Word*>(in) + move.from * words;
  for (std::int64_t i = threadIdx.x; i < words; i += blockDim.x) {
    to[i] = from[i];
  }
}

template <typename Word>
void scatter(const ScatterRows& op, cudaStream_t stream) {
  const std::int64_t words = op.row_bytes / static_cast<std::int64_t>(sizeof(Word));
  const std::int64_t threads = std::min(kMaxThreads, round_up(words, 32));
  launch("scatter rows", &scatter_kernel<Word>,
         {.blocks = op.count, .threads = static_cast<int>(threads)}, stream, op.out, op.in,
         op.moves, words);
}

}  // namespace

void scatter_rows(const ScatterRows& op, cudaStream_t stream) {
  if (op.count <= 0 || op.row_bytes <= 0) {
    return;
  }
  const auto aligned = [&](std::uintptr_t to) {
    return (reinterpret_cast<std::uintptr_t>(op.out) | reinterpret_cast<std::uintptr_t>(op.in) |
            static_cast<std::uintptr_t>(op.row_bytes)) %
               to ==
           0;
  };
  if (aligned(16)) {
    scatter<uint4>(op, stream);
  } else if (aligned(4)) {
    scatter<std::uint32_t>(op, stream);
  } else {
    scatter<std::byte>(op, stream);
  }
}

}  // namespace poise::cuda
