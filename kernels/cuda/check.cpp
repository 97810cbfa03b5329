#include "kernels/cuda/check.h"

#include "common/trouble.h"

namespace poise::cuda {

void cuda_failed(cudaError_t code, const char* what, std::source_location where) {
  fail(Exit::interrupted, "CUDA: {} failed: {} ({}, {}:{})", what, cudaGetErrorString(code),
       cudaGetErrorName(code), where.file_name(), where.line());
}

}  // namespace poise::cuda
