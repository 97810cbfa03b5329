#pragma once
// The only function that starts our kernels. Asynchronous; if CUDA refuses a launch, it throws
// Failure with the kernel's name. For .cu files.

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/cuda/check.h"

namespace poise::cuda {

struct Grid {
  std::int64_t blocks;
  int threads;
  std::size_t shared_bytes = 0;  // dynamic; beyond 48 KiB the kernel was allowed to (allow_shared)
  int cluster = 1;  // blocks that run together; more than one from compute capability 9.0 on
};

// Nothing runs for a grid without blocks. Arguments convert to the kernel's own parameter types.
template <typename... Parameters>
void launch(const char* name, void (*kernel)(Parameters...), const Grid& grid, cudaStream_t stream,
            std::type_identity_t<Parameters>... arguments) {
  if (grid.blocks <= 0) {
    return;
  }
  require(grid.blocks <= 0x7fffffff, "a grid has less than 2^31 blocks");
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(grid.blocks));
  config.blockDim = dim3(static_cast<unsigned>(grid.threads));
  config.dynamicSmemBytes = grid.shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute cluster{};
  if (grid.cluster > 1) {
    require(grid.blocks % grid.cluster == 0, "a grid is made of whole clusters");
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {static_cast<unsigned>(grid.cluster), 1, 1};
    config.attrs = &cluster;
    config.numAttrs = 1;
  }
  cuda_check(cudaLaunchKernelEx(&config, kernel, arguments...), name);
}

// Once for each kernel that uses more than 48 KiB of dynamic shared memory: as many blocks a
// multiprocessor as its shared memory holds, at the cost of its L1 cache.
template <typename... Parameters>
void allow_shared(const char* name, void (*kernel)(Parameters...), std::size_t bytes) {
  cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(bytes)),
             name);
  cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                  cudaSharedmemCarveoutMaxShared),
             name);
}

}  // namespace poise::cuda
