#pragma once
// The device's clock: when the GPU passed an event, in nanoseconds since the clock was made. CUDA
// tells the time between two events as a float, good to 60 ns over a second and worse over more, so
// the event that times count from moves along. Host thread of the device only.

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>

#include "gpu_executor/cuda/cuda_stream.h"

namespace poise {

class CudaClock {
 public:
  CudaClock();
  ~CudaClock();
  CudaClock(const CudaClock&) = delete;
  CudaClock& operator=(const CudaClock&) = delete;

  // REQUIRES: reached.
  std::int64_t time_of(const TimedEvent& event);

 private:
  std::unique_ptr<TimedEvent> strike();

  cudaStream_t stream_ = nullptr;  // idle, so that an event on it is passed at once
  std::unique_ptr<TimedEvent> from_;
  double from_ns_ = 0;
};

}  // namespace poise
