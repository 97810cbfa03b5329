#pragma once
// One CUDA stream and what it did: bytes copied, time at work, time spent waiting. Work between two
// waits is a span; an event stands at both its ends. Spans are added up, oldest first, when `totals`
// is asked for at an event behind them. Host thread of the device only.
//
// A timed event delays its stream: on an H200 by 2 µs, by 7 while copies come in. So events between
// which nothing was queued and the stream did not rest share one CUDA event, and events that only order
// streams are not timed; they cost nothing that could be measured.

#include <cuda_runtime_api.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "gpu_executor/device.h"

namespace poise {

class CudaStream;

// An event of CUDA; destroyed with its last owner.
class RawEvent {
 public:
  explicit RawEvent(bool timed = true);
  ~RawEvent();
  RawEvent(const RawEvent&) = delete;
  RawEvent& operator=(const RawEvent&) = delete;

  cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

class CudaEvent final : public Event {
 public:
  explicit CudaEvent(bool tells) : timed(tells), point(std::make_shared<RawEvent>(tells)) {}

  const bool timed;
  std::shared_ptr<RawEvent> point;  // with others on its stream, where it is timed
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

  // The stream, for work that copies this many bytes.
  cudaStream_t work(Bytes copied = {});
  void record(CudaEvent& event);
  void wait(const CudaEvent& event);
  // New work begins. Where the stream has passed its last timed event and nothing was queued since, it has
  // rested until now, which is neither work nor waiting.
  void resume();
  // REQUIRES: timed, recorded here and reached; asked in the order of recording, or again.
  StreamTotals totals(CudaEvent& event);
  cudaStream_t get() const { return stream_; }

 private:
  using Point = std::shared_ptr<RawEvent>;
  struct Span {
    Point begin, end;     // end: null while it goes on
    bool rested = false;  // before it
  };

  // The time by now: the last event where nothing was queued or to be waited for since, or a new one.
  const Point& now();
  void add_mark(bool rested);
  // For another use here, unless an event still refers to it.
  void give_back(Point&& point);

  cudaStream_t stream_ = nullptr;
  std::deque<Span> spans_;   // not added up yet
  std::uint64_t begun_ = 0;  // spans since the start
  std::uint64_t added_ = 0;  // of them, added up
  StreamTotals sum_;         // of those
  Point last_end_;           // of the spans added up
  Point now_;                // null: the next is a new one
  bool open_ = false;
  Bytes bytes_{};
  std::vector<Point> spare_;
};

}  // namespace poise
