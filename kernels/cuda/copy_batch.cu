#include <cuda_runtime.h>

#include <algorithm>

#include "common/units.h"
#include "kernels/cuda/kernels_cuda.h"
#include "kernels/cuda/launch.h"

namespace poise::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kAtOnce = 4;                      // words of a thread under way together
constexpr std::int64_t kPart = 32 << 10;        // bytes of a copy that one block of threads moves
constexpr std::size_t kFew = 32, kMax = 160;    // copies of one launch: its arguments, within 4 KB
constexpr std::int64_t kMaxBlocks = 1ll << 20;  // of threads

template <std::size_t N>
struct Table {
  DeviceCopy copies[N];
};

// Blocks of threads go through a copy's parts, `parts` of each.
template <typename Word, std::size_t N>
__global__ void __launch_bounds__(kThreads)
    copy_kernel(const __grid_constant__ Table<N> table, std::int64_t parts) {
  const DeviceCopy& one = table.copies[blockIdx.x / parts];
  const std::int64_t part = blockIdx.x % parts;
  const std::int64_t words = one.bytes / static_cast<std::int64_t>(sizeof(Word));
  const std::int64_t end = words * (part + 1) / parts;
  auto* to = static_cast<Word*>(one.to);
  const auto* from = static_cast<const Word*>(one.from);
  for (std::int64_t i = words * part / parts + threadIdx.x; i < end; i += kThreads * kAtOnce) {
    Word some[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (i + j * kThreads < end) {
        some[j] = from[i + j * kThreads];
      }
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (i + j * kThreads < end) {
        to[i + j * kThreads] = some[j];
      }
    }
  }
}

template <typename Word, std::size_t N>
void copy(std::span<const DeviceCopy> copies, std::int64_t longest, cudaStream_t stream) {
  Table<N> table{};
  std::ranges::copy(copies, table.copies);
  const auto count = static_cast<std::int64_t>(copies.size());
  const std::int64_t parts =
      std::clamp(ceil_div(longest, kPart), std::int64_t{1}, kMaxBlocks / count);
  launch("copy batch", &copy_kernel<Word, N>, {.blocks = count * parts, .threads = kThreads},
         stream, table, parts);
}

template <typename Word>
void copy(std::span<const DeviceCopy> copies, std::int64_t longest, cudaStream_t stream) {
  if (copies.size() <= kFew) {
    copy<Word, kFew>(copies, longest, stream);
  } else {
    copy<Word, kMax>(copies, longest, stream);
  }
}

}  // namespace

void copy_batch(std::span<const DeviceCopy> copies, cudaStream_t stream) {
  for (; copies.size() > kMax; copies = copies.subspan(kMax)) {
    copy_batch(copies.first(kMax), stream);
  }
  std::int64_t longest = 0;
  std::uintptr_t bits = 0;
  for (const DeviceCopy& one : copies) {
    longest = std::max(longest, one.bytes);
    bits |= reinterpret_cast<std::uintptr_t>(one.to) | reinterpret_cast<std::uintptr_t>(one.from) |
            static_cast<std::uintptr_t>(one.bytes);
  }
  if (longest == 0) {
    return;
  }
  if (bits % 16 == 0) {
    copy<uint4>(copies, longest, stream);
  } else if (bits % 4 == 0) {
    copy<std::uint32_t>(copies, longest, stream);
  } else {
    copy<std::byte>(copies, longest, stream);
  }
}

}  // namespace poise::cuda
