#include "gpu_executor/tracer.h"

#include <fmt/core.h>

#include <utility>

#include "common/trouble.h"

namespace poise {

void Tracer::begin(const Piece& piece) {
  if (!on_) {
    return;
  }
  end();
  const std::size_t now = mark(piece.stream);
  open_ = OrderTrace::Marked{.piece = piece, .bytes = {}, .begin = now, .end = now};
  device_.range_push(
      fmt::format("{} {}", messages::EnumNameSpanKind(piece.kind),
                  piece.kind == messages::SpanKind::Weights ? piece.layer : piece.mini_batch)
          .c_str());
}

void Tracer::end(Bytes bytes) {
  if (!open_) {
    return;
  }
  open_->bytes = bytes;
  open_->end = mark(open_->piece.stream);
  trace_.pieces.push_back(*std::exchange(open_, std::nullopt));
  device_.range_pop();
}

OrderTrace Tracer::take() {
  check(!open_, "an order's last piece has ended");
  return std::exchange(trace_, {});
}

std::vector<messages::Span> Tracer::spans(OrderTrace trace) {
  std::vector<messages::Span> spans;
  spans.reserve(trace.pieces.size());
  for (const OrderTrace::Marked& one : trace.pieces) {
    spans.emplace_back(
        one.piece.kind, static_cast<std::uint8_t>(one.piece.stream), one.piece.weight_piece,
        one.piece.mini_batch, one.piece.layer, static_cast<std::uint64_t>(one.bytes.n),
        device_.time_of(*trace.marks[one.begin]), device_.time_of(*trace.marks[one.end]));
  }
  for (auto& event : trace.marks) {
    spare_.push_back(std::move(event));
  }
  return spans;
}

std::size_t Tracer::mark(Stream stream) {
  if (spare_.empty()) {
    trace_.marks.push_back(device_.make_event());
  } else {
    trace_.marks.push_back(std::move(spare_.back()));
    spare_.pop_back();
  }
  device_.record(*trace_.marks.back(), stream);
  return trace_.marks.size() - 1;
}

}  // namespace poise
