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

RawEvent::RawEvent(bool timed) {
  cuda_check(cudaEventCreateWithFlags(&event_, timed ? cudaEventDefault : cudaEventDisableTiming),
             "making an event");
}

RawEvent::~RawEvent() { static_cast<void>(cudaEventDestroy(event_)); }

CudaStream::CudaStream() {
  cuda_check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "making a stream");
}

CudaStream::~CudaStream() {
  static_cast<void>(cudaStreamSynchronize(stream_));
  static_cast<void>(cudaStreamDestroy(stream_));
}

cudaStream_t CudaStream::work(Bytes copied) {
  if (!open_) {
    spans_.push_back({.begin = now(), .end = nullptr});
    ++begun_;
    open_ = true;
  }
  give_back(std::move(now_));
  bytes_ += copied;
  return stream_;
}

void CudaStream::record(CudaEvent& event) {
  CudaStream* before = std::exchange(event.stream, this);
  event.recorded = true;
  if (!event.timed) {
    cuda_check(cudaEventRecord(event.point->get(), stream_), "recording an event");
    return;
  }
  event.spans = begun_;
  event.inside = open_;
  event.bytes = bytes_;
  event.totals.reset();
  // To the stream it came from: where events go round the streams, another would gather what this one
  // makes anew each time.
  (before != nullptr ? *before : *this).give_back(std::exchange(event.point, now()));
}

void CudaStream::wait(const CudaEvent& event) {
  if (!event.recorded || event.stream == this) {
    give_back(std::move(now_));  // what comes next may come later, if only for its caller
    return;
  }
  if (open_) {
    spans_.back().end = now();
    open_ = false;
  }
  give_back(std::move(now_));
  cuda_check(cudaStreamWaitEvent(stream_, event.point->get(), 0), "waiting for a stream");
}

void CudaStream::resume() {
  if (!now_) {
    return;  // something was queued, or it waits
  }
  const cudaError_t code = cudaEventQuery(now_->get());
  if (code == cudaErrorNotReady) {
    return;
  }
  cuda_check(code, "the work before an event");
  if (open_) {
    spans_.back().end = now_;
    open_ = false;
  } else {
    add_mark(false);  // what it waited for until then, it waited for
  }
  give_back(std::move(now_));
  add_mark(true);
}

// A span of no length, here.
void CudaStream::add_mark(bool rested) {
  const Point here = now();
  spans_.push_back({.begin = here, .end = here, .rested = rested});
  ++begun_;
}

StreamTotals CudaStream::totals(CudaEvent& event) {
  if (event.totals) {
    return *event.totals;
  }
  check(event.timed, "totals are asked of an event that tells the time");
  const std::uint64_t whole = event.spans - (event.inside ? 1 : 0);
  check(added_ <= whole || (event.inside && added_ <= event.spans),
        "totals are asked in the order of recording");
  while (added_ < whole) {
    Span& span = spans_.front();
    check(span.end != nullptr, "a span before another has ended");
    if (last_end_) {
      sum_.wait_ns += span.rested ? 0 : ns_between(last_end_->get(), span.begin->get());
      give_back(std::move(last_end_));
    }
    sum_.busy_ns += ns_between(span.begin->get(), span.end->get());
    give_back(std::move(span.begin));
    last_end_ = std::move(span.end);
    spans_.pop_front();
    ++added_;
  }
  StreamTotals totals = sum_;
  totals.bytes = event.bytes.n;
  if (event.inside) {
    const Span& span = spans_.front();
    if (last_end_ && !span.rested) {
      totals.wait_ns += ns_between(last_end_->get(), span.begin->get());
    }
    totals.busy_ns += ns_between(span.begin->get(), event.point->get());
  }
  event.totals = totals;
  return totals;
}

const CudaStream::Point& CudaStream::now() {
  if (!now_) {
    if (spare_.empty()) {
      now_ = std::make_shared<RawEvent>();
    } else {
      now_ = std::move(spare_.back());
      spare_.pop_back();
    }
    cuda_check(cudaEventRecord(now_->get(), stream_), "recording an event");
  }
  return now_;
}

void CudaStream::give_back(Point&& point) {
  Point mine = std::move(point);
  if (mine.use_count() == 1) {
    spare_.push_back(std::move(mine));
  }
}

}  // namespace poise
