#include "gpu_executor/cuda/cuda_clock.h"

#include <utility>

#include "kernels/cuda/check.h"

namespace poise {
namespace {

using cuda::cuda_check;

constexpr double kLongestNs = 4e9;

double ns_between(const RawEvent& from, const RawEvent& to) {
  float milliseconds = 0;
  cuda_check(cudaEventElapsedTime(&milliseconds, from.get(), to.get()),
             "the time between two events");
  return static_cast<double>(milliseconds) * 1e6;
}

}  // namespace

CudaClock::CudaClock() {
  cuda_check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "making a stream");
  older_ = {.event = strike()};
  newer_.event = strike();
  newer_.at_ns = ns_between(*older_.event, *newer_.event);
}

CudaClock::~CudaClock() { static_cast<void>(cudaStreamDestroy(stream_)); }

std::int64_t CudaClock::time_of(const RawEvent& event) {
  double time = older_.at_ns + ns_between(*older_.event, event);
  if (time > newer_.at_ns) {
    time = newer_.at_ns + ns_between(*newer_.event, event);
  }
  if (time - newer_.at_ns > kLongestNs) {
    auto now = strike();
    const double at = newer_.at_ns + ns_between(*newer_.event, *now);
    older_ = std::exchange(newer_, {.event = std::move(now), .at_ns = at});
  }
  return static_cast<std::int64_t>(time);
}

std::unique_ptr<RawEvent> CudaClock::strike() {
  auto event = std::make_unique<RawEvent>();
  cuda_check(cudaEventRecord(event->get(), stream_), "recording an event");
  cuda_check(cudaStreamSynchronize(stream_), "the clock's stream");
  return event;
}

}  // namespace poise
