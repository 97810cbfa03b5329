#pragma once
// The device's clock: when the GPU passed an event, in nanoseconds since the clock was made. CUDA
// gives the time between two events as a float, good to 60 ns over a second and worse over more, so
// the events that times count from move along: the older of two serves what lies before the newer.
// Host thread of the device only.

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
  std::int64_t time_of(const RawEvent& event);

 private:
  struct Mark {
    std::unique_ptr<RawEvent> event;
    double at_ns = 0;
  };

  std::unique_ptr<RawEvent> strike();

  cudaStream_t stream_ = nullptr;  // idle, so that an event on it is passed at once
  Mark older_, newer_;
};

}  // namespace poise
