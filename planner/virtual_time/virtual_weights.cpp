#include "planner/virtual_time/virtual_weights.h"

#include <algorithm>

#include "common/trouble.h"
#include "common/weight_fetch.h"

namespace poise {

double VirtualWeights::share(std::uint32_t piece) const {
  return static_cast<double>(layout_.layer.pieces[piece].bytes.n) /
         static_cast<double>(layout_.layer.bytes.n);
}

Seconds VirtualWeights::fetch(const messages::WeightFetch& piece, Seconds time,
                              VirtualStreams& streams) {
  const bool begun = std::ranges::any_of(
      buffers_, [&](const Buffer& buffer) { return buffer.layer == piece.layer(); });
  if (!begun) {
    Buffer& next = buffers_[fetched_layers_++ % buffers_.size()];
    next.layer = piece.layer();
    next.arrived.assign(layout_.layer.pieces.size(), Seconds{});
  }
  Buffer& buffer = buffers_[buffers_[0].layer == piece.layer() ? 0 : 1];
  buffer.arrived[piece.piece()] =
      streams.add(VirtualStream::copy_in, buffer.computed, time,
                  {.kind = VirtualSpan::Kind::weights, .layer = piece.layer()});
  return time;
}

bool VirtualWeights::brought_by(const std::vector<messages::WeightFetch>& pieces,
                                std::uint32_t layer, Weight weight) const {
  return !is_resident(limits_, LayerId{layer}, layout_.layers) &&
         fetches(pieces, layout_, LayerId{layer}, weight);
}

Seconds VirtualWeights::arrived(std::uint32_t layer, Weight weight) const {
  const WeightEntry* entry = layout_.layer.find(weight);
  if (entry == nullptr || is_resident(limits_, LayerId{layer}, layout_.layers)) {
    return {};
  }
  for (const Buffer& buffer : buffers_) {
    if (buffer.layer == layer) {
      return *std::max_element(buffer.arrived.begin() + entry->piece,
                               buffer.arrived.begin() + entry->last_piece + 1);
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
