#include "gpu_executor/cuda/cuda_stream.h"

#include <utility>

#include "common/trouble.h"
#include "kernels/cuda/check.h"

namespace poise {
namespace {

using cuda::cuda_check;

std::int64_t ns_between(cudaEvent_t from, cudaEvent_t to) {
  float milliseconds = 0;
  cuda_check(cudaEventElapsedTime(&milliseconds, from, to), "the time between two events");
  return static_cast<std::int64_t>(static_cast<double>(milliseconds) * 1e6);
}

}  // namespace

TimedEvent::TimedEvent() { cuda_check(cudaEventCreate(&event_), "making an event"); }

TimedEvent::~TimedEvent() { static_cast<void>(cudaEventDestroy(event_)); }

CudaStream::CudaStream() {
  cuda_check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "making a stream");
}

CudaStream::~CudaStream() {
  static_cast<void>(cudaStreamSynchronize(stream_));
  static_cast<void>(cudaStreamDestroy(stream_));
}

cudaStream_t CudaStream::work(Bytes copied) {
  if (!open_) {
    spans_.push_back({.begin = take(), .end = nullptr});
    ++begun_;
    open_ = true;
    cuda_check(cudaEventRecord(spans_.back().begin->get(), stream_), "recording an event");
  }
  bytes_ += copied;
  return stream_;
}

void CudaStream::record(CudaEvent& event) {
  event.stream = this;
  event.recorded = true;
  event.spans = begun_;
  event.inside = open_;
  event.bytes = bytes_;
  event.totals.reset();
  cuda_check(cudaEventRecord(event.point.get(), stream_), "recording an event");
}

void CudaStream::wait(const CudaEvent& event) {
  if (!event.recorded || event.stream == this) {
    return;
  }
  if (open_) {
    spans_.back().end = take();
    cuda_check(cudaEventRecord(spans_.back().end->get(), stream_), "recording an event");
    open_ = false;
  }
  cuda_check(cudaStreamWaitEvent(stream_, event.point.get(), 0), "waiting for a stream");
}

StreamTotals CudaStream::totals(CudaEvent& event) {
  if (event.totals) {
    return *event.totals;
  }
  const std::uint64_t whole = event.spans - (event.inside ? 1 : 0);
  check(added_ <= whole || (event.inside && added_ <= event.spans),
        "totals are asked in the order of recording");
  while (added_ < whole) {
    Span& span = spans_.front();
    check(span.end != nullptr, "a span before another has ended");
    if (last_end_) {
      sum_.wait_ns += ns_between(last_end_->get(), span.begin->get());
      spare_.push_back(std::move(last_end_));
    }
    sum_.busy_ns += ns_between(span.begin->get(), span.end->get());
    spare_.push_back(std::move(span.begin));
    last_end_ = std::move(span.end);
    spans_.pop_front();
    ++added_;
  }
  StreamTotals totals = sum_;
  totals.bytes = event.bytes.n;
  if (event.inside) {
    const Span& span = spans_.front();
    if (last_end_) {
      totals.wait_ns += ns_between(last_end_->get(), span.begin->get());
    }
    totals.busy_ns += ns_between(span.begin->get(), event.point.get());
  }
  event.totals = totals;
  return totals;
}

std::unique_ptr<TimedEvent> CudaStream::take() {
  if (spare_.empty()) {
    return std::make_unique<TimedEvent>();
  }
  auto event = std::move(spare_.back());
  spare_.pop_back();
  return event;
}

}  // namespace poise
