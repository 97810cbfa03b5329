#include "planner/virtual_time/virtual_weights.h"

#include <algorithm>

#include "common/trouble.h"
#include "common/weight_fetch.h"

namespace poise {

VirtualWeights::VirtualWeights(const WeightLayout& layout, const DeviceLimits& limits)
    : layout_(layout), streamed_(static_cast<std::size_t>(layout.layers)) {
  for (const WeightPiece& piece : layout.layer.pieces) {
    shares_.push_back(static_cast<double>(piece.bytes.n) /
                      static_cast<double>(layout.layer.bytes.n));
  }
  for (const WeightEntry& entry : layout.layer.entries) {
    pieces_[static_cast<std::size_t>(entry.weight)] = {
        .first = static_cast<std::uint32_t>(entry.piece),
        .last = static_cast<std::uint32_t>(entry.last_piece)};
  }
  for (std::uint32_t layer = 0; layer < streamed_.size(); ++layer) {
    streamed_[layer] = !is_resident(limits, LayerId{layer}, layout.layers);
  }
}

Seconds VirtualWeights::fetch(const messages::WeightFetch& piece, Seconds time,
                              VirtualStreams& streams) {
  const bool begun = std::ranges::any_of(
      buffers_, [&](const Buffer& buffer) { return buffer.layer == piece.layer(); });
  if (!begun) {
    Buffer& next = buffers_[fetched_layers_++ % buffers_.size()];
    next.layer = piece.layer();
    next.arrived.assign(shares_.size(), Seconds{});
  }
  Buffer& buffer = buffers_[buffers_[0].layer == piece.layer() ? 0 : 1];
  buffer.arrived[piece.piece()] =
      streams.add(VirtualStream::copy_in, buffer.computed, time,
                  {.kind = VirtualSpan::Kind::weights, .layer = piece.layer()});
  return time;
}

bool VirtualWeights::brought_by(const std::vector<messages::WeightFetch>& pieces,
                                std::uint32_t layer, Weight weight) const {
  return streamed_[layer] && fetches(pieces, layout_, LayerId{layer}, weight);
}

Seconds VirtualWeights::arrived(std::uint32_t layer, Weight weight) const {
  const auto& at = pieces_of(weight);
  if (!at || !streamed_[layer]) {
    return {};
  }
  for (const Buffer& buffer : buffers_) {
    if (buffer.layer == layer) {
      return *std::max_element(buffer.arrived.begin() + at->first,
                               buffer.arrived.begin() + at->last + 1);
    }
  }
  check(false, "a streamed layer is fetched before it is computed");
  return {};
}

void VirtualWeights::computed(std::uint32_t layer, Seconds when) {
  for (Buffer& buffer : buffers_) {
    if (buffer.layer == layer) {
      buffer.computed = when;
    }
  }
}

}  // namespace poise
