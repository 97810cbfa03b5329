#pragma once
// What the tests of CUDA kernels share: arrays in device memory. All goes through the default stream; reading back waits for it.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <vector>

#include "kernels/cuda/check.h"
#include "kernels/cuda/kernels_cuda.h"
#include "tests/kernels/tensors.h"
#include "tests/support/cuda_test.h"

namespace poise::test {

class DeviceBytes {
 public:
  explicit DeviceBytes(std::size_t size) : size_(size) {
    cuda::cuda_check(cudaMalloc(&data_, size > 0 ? size : 1), "cudaMalloc");
  }
  DeviceBytes(const void* from, std::size_t size) : DeviceBytes(size) {
    cuda::cuda_check(cudaMemcpy(data_, from, size, cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  ~DeviceBytes() { static_cast<void>(cudaFree(data_)); }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;

  void* get() const { return data_; }
  void read(void* to) const {
    cuda::cuda_check(cudaDeviceSynchronize(), "a kernel");
    cuda::cuda_check(cudaMemcpy(to, data_, size_, cudaMemcpyDeviceToHost), "cudaMemcpy");
  }

 private:
  void* data_ = nullptr;
  std::size_t size_;
};

template <typename T>
class OnDevice {
 public:
  explicit OnDevice(const std::vector<T>& values)
      : count_(values.size()), bytes_(values.data(), values.size() * sizeof(T)) {}
  explicit OnDevice(std::size_t count) : count_(count), bytes_(count * sizeof(T)) {}

  T* get() const { return static_cast<T*>(bytes_.get()); }
  std::vector<T> read() const {
    std::vector<T> values(count_);
    bytes_.read(values.data());
    return values;
  }

 private:
  std::size_t count_;
  DeviceBytes bytes_;
};

class StoredOnDevice {
 public:
  explicit StoredOnDevice(const Stored& values)
      : dtype_(values.dtype()),
        count_(values.size()),
        bytes_(values.data(), count_ * static_cast<std::size_t>(size_of(dtype_).n)) {}

  void* get() const { return bytes_.get(); }
  Stored read() const {
    Stored values(dtype_, count_);
    bytes_.read(values.data());
    return values;
  }

 private:
  DType dtype_;
  std::size_t count_;
  DeviceBytes bytes_;
};

inline std::vector<float> floats_of(const Stored& stored) {
  std::vector<float> values(stored.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = stored[i];
  }
  return values;
}

}  // namespace poise::test
