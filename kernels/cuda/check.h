#pragma once
// The only check of CUDA's error codes. Every call of the runtime goes through `cuda_check`, which
// turns an error into one sentence (Failure, Exit::device_failed): GPU errors are sticky, so the process
// must end.

#include <cuda_runtime_api.h>

#include <source_location>

namespace poise::cuda {

[[noreturn]] void cuda_failed(cudaError_t code, const char* what, std::source_location where);

inline void cuda_check(cudaError_t code, const char* what = "a call of the CUDA runtime",
                       std::source_location where = std::source_location::current()) {
  if (code != cudaSuccess) [[unlikely]] {
    cuda_failed(code, what, where);
  }
}

[[noreturn]] void invariant_broken(const char* invariant, std::source_location where);

// `check` of common/trouble.h (Defect) for .cu files, in which the headers behind it do not compile.
inline void require(bool condition, const char* invariant,
                    std::source_location where = std::source_location::current()) {
  if (!condition) [[unlikely]] {
    invariant_broken(invariant, where);
  }
}

}  // namespace poise::cuda
