#include "gpu_executor/cuda/cuda_clock.h"

#include "kernels/cuda/check.h"

namespace poise {
namespace {

using cuda::cuda_check;

constexpr double kLongestNs = 1e9;

double ns_between(const TimedEvent& from, const TimedEvent& to) {
  float milliseconds = 0;
  cuda_check(cudaEventElapsedTime(&milliseconds, from.get(), to.get()),
             "the time between two events");
  return static_cast<double>(milliseconds) * 1e6;
}

}  // namespace

CudaClock::CudaClock() {
  cuda_check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "making a stream");
  from_ = strike();
}

CudaClock::~CudaClock() { static_cast<void>(cudaStreamDestroy(stream_)); }

std::int64_t CudaClock::time_of(const TimedEvent& event) {
  const double since = ns_between(*from_, event);
  const double time = from_ns_ + since;
  if (since > kLongestNs) {
    auto now = strike();
    from_ns_ += ns_between(*from_, *now);
    from_ = std::move(now);
  }
  return static_cast<std::int64_t>(time);
}

std::unique_ptr<TimedEvent> CudaClock::strike() {
  auto event = std::make_unique<TimedEvent>();
  cuda_check(cudaEventRecord(event->get(), stream_), "recording an event");
  cuda_check(cudaStreamSynchronize(stream_), "the clock's stream");
  return event;
}

}  // namespace poise
