#pragma once
// The one door for CUDA's error codes. Every call of the runtime goes through `cuda_check`; a code
// that is not success becomes one sentence (Failure, Exit::interrupted): errors of a GPU are sticky
// and the process that has one is of no more use.

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

}  // namespace poise::cuda
