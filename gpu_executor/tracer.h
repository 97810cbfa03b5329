#pragma once
// A timeline of what orders do: events at the beginning and the end of each piece of work on each
// stream, read once the order is finished. Pieces are queued one after the other, whatever their
// streams; waits for other streams stand between them, not in them. A profiler that watches sees
// ranges of the same names. Without a trace every call returns at once. Belongs to the pipeline.

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "common/messages_generated.h"
#include "common/units.h"
#include "gpu_executor/device.h"

namespace poise {

// What a piece of work is; `messages::Span` says what the numbers mean.
struct Piece {
  messages::SpanKind kind;
  Stream stream;
  std::uint32_t mini_batch = 0, layer = 0;
  std::uint16_t weight_piece = 0;
};

// The pieces of one order, their events not yet read.
struct OrderTrace {
  struct Marked {
    Piece piece;
    Bytes bytes;
    std::size_t begin, end;  // of `marks`
  };
  std::vector<Marked> pieces;
  std::vector<std::unique_ptr<Event>> marks;
};

class Tracer {
 public:
  Tracer(Device& device, bool on) : device_(device), on_(on) {}

  // What is queued from here to the next `begin` or `end` is this piece. REQUIRES: no piece of
  // another stream is open.
  void begin(const Piece& piece);
  // Ends the open piece, if there is one.
  void end(Bytes bytes = {});

  // What was marked since the last call.
  OrderTrace take();
  // REQUIRES: the streams are past all of it.
  std::vector<messages::Span> spans(OrderTrace trace);

 private:
  std::size_t mark(Stream stream);

  Device& device_;
  const bool on_;
  OrderTrace trace_;
  std::optional<OrderTrace::Marked> open_;
  std::vector<std::unique_ptr<Event>> spare_;
};

}  // namespace poise
