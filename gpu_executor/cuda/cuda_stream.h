#pragma once
// One CUDA stream and what it did: bytes copied, time at work, time spent waiting. Work between two
// waits is a span; an event stands at both its ends. Spans are added up, oldest first, when somebody
// asks what the stream had done at an event behind them. Host thread of the device only.

#include <cuda_runtime_api.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "gpu_executor/device.h"

namespace poise {

class CudaStream;

// An event of CUDA with timing on; destroyed with its owner.
class TimedEvent {
 public:
  TimedEvent();
  ~TimedEvent();
  TimedEvent(const TimedEvent&) = delete;
  TimedEvent& operator=(const TimedEvent&) = delete;

  cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

class CudaEvent final : public Event {
 public:
  TimedEvent point;
  bool recorded = false;
  std::uint64_t spans = 0;             // begun on its stream when it was recorded
  bool inside = false;                 // the last of them had not ended
  Bytes bytes{};                       // copied by then
  CudaStream* stream = nullptr;        // it was recorded on
  std::optional<StreamTotals> totals;  // once asked for
};

class CudaStream {
 public:
  CudaStream();
  ~CudaStream();
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;

  // The stream, for work that copies so many bytes.
  cudaStream_t work(Bytes copied = {});
  void record(CudaEvent& event);
  void wait(const CudaEvent& event);
  // REQUIRES: recorded here and reached; asked in the order of recording, or again.
  StreamTotals totals(CudaEvent& event);
  cudaStream_t get() const { return stream_; }

 private:
  struct Span {
    std::unique_ptr<TimedEvent> begin, end;  // end: null while it goes on
  };

  std::unique_ptr<TimedEvent> take();

  cudaStream_t stream_ = nullptr;
  std::deque<Span> spans_;   // not added up yet
  std::uint64_t begun_ = 0;  // spans since the start
  std::uint64_t added_ = 0;  // of them, added up
  StreamTotals sum_;         // of those
  std::unique_ptr<TimedEvent> last_end_;
  bool open_ = false;
  Bytes bytes_{};
  std::vector<std::unique_ptr<TimedEvent>> spare_;
};

}  // namespace poise
