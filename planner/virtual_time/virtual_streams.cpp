#include "planner/virtual_time/virtual_streams.h"

#include <algorithm>

namespace poise {

void VirtualStreams::begin(Seconds now) {
  for (Seconds& end : ends_) {
    end = std::max(end, now);
  }
}

Seconds VirtualStreams::add(VirtualStream stream, Seconds needed, Seconds time) {
  Seconds& end = ends_[static_cast<std::size_t>(stream)];
  return end = (needed > end ? needed + event_latency_ : end) + time;
}

Seconds VirtualStreams::add(VirtualStream stream, Seconds needed, Seconds time, VirtualSpan span) {
  const Seconds end = add(stream, needed, time);
  if (spans_ != nullptr && time.n > 0) {
    span.begin = end - time;
    span.end = end;
    spans_->push_back(span);
  }
  return end;
}

Seconds VirtualStreams::end() const { return *std::ranges::max_element(ends_); }

}  // namespace poise
