#include "kernels/cuda/check.h"

#include "common/trouble.h"

namespace poise::cuda {

void cuda_failed(cudaError_t code, const char* what, std::source_location where) {
  fail(Exit::device_failed, "CUDA: {} failed: {} ({}, {}:{})", what, cudaGetErrorString(code),
       cudaGetErrorName(code), where.file_name(), where.line());
}

void invariant_broken(const char* invariant, std::source_location where) {
  check(false, invariant, where);
  __builtin_unreachable();
}

}  // namespace poise::cuda
