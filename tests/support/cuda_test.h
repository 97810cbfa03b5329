#pragma once
// Tests that need a GPU, and are skipped where there is none.

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

namespace poise::test {

class CudaTest : public testing::Test {
 protected:
  void SetUp() override {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
      GTEST_SKIP() << "this machine has no CUDA device";
    }
  }
};

}  // namespace poise::test
