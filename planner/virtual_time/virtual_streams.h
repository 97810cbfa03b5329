#pragma once
// The device's three streams, and that of the host cores, in virtual time. Each does its work in order, and begins a span once it is
// free and the work that the span waits for is done. Pure; one thread.

#include <array>
#include <cstdint>
#include <vector>

#include "common/units.h"

namespace poise {

// A span of work of one stream.
struct VirtualSpan {
  enum class Kind : std::uint8_t {
    load,
    weights,
    kv_gen,
    attention,
    products,
    head,
    store,
    host
  } kind;
  Seconds begin, end;
  std::uint32_t layer = 0;       // that it is of
  std::uint32_t mini_batch = 0;  // of `load`, `kv_gen`, `attention` and `host`
};

enum class VirtualStream : std::uint8_t { copy_in = 0, compute = 1, copy_out = 2, host = 3 };

class VirtualStreams {
 public:
  // `event_latency`: how late work begins that waited for another stream.
  explicit VirtualStreams(Seconds event_latency) : event_latency_(event_latency) {}

  // From now on spans are also added to `spans`; null: they are not.
  void trace(std::vector<VirtualSpan>* spans) { spans_ = spans; }

  // No stream does anything before `now`.
  void begin(Seconds now);
  // Work of `time` on a stream, behind all that it was given and behind `needed`. Returns its end.
  Seconds add(VirtualStream stream, Seconds needed, Seconds time);
  // The same with a span; where the work takes no time, there is none.
  Seconds add(VirtualStream stream, Seconds needed, Seconds time, VirtualSpan span);
  // When the stream has done all that it was given.
  Seconds end(VirtualStream stream) const { return ends_[static_cast<std::size_t>(stream)]; }
  Seconds end() const;  // … when all have

 private:
  Seconds event_latency_;
  std::array<Seconds, 4> ends_{};
  std::vector<VirtualSpan>* spans_ = nullptr;
};

}  // namespace poise
