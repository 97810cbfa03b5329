#pragma once
// When the pieces of streamed layers are on the device, in virtual time: two buffers in turn, each free
// for another layer once its own was computed. Pure; one thread.

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "common/device_memory.h"
#include "common/messages_generated.h"
#include "common/weight_layout.h"
#include "planner/costs/cost_model.h"
#include "planner/virtual_time/virtual_streams.h"

namespace poise {

class VirtualWeights {
 public:
  VirtualWeights(const WeightLayout& layout, const DeviceLimits& limits);

  // A piece crosses the link in `time`, which is returned.
  Seconds fetch(const messages::WeightFetch& piece, Seconds time, VirtualStreams& streams);
  // The share of a layer's bytes that a piece is.
  double share(std::uint32_t piece) const { return shares_[piece]; }

  // Whether these fetches bring some of a streamed layer's weight (common/weight_fetch.h).
  bool brought_by(const std::vector<messages::WeightFetch>& pieces, std::uint32_t layer,
                  Weight weight) const;
  // When all of a weight is there; at once for a resident layer. REQUIRES: it was fetched.
  Seconds arrived(std::uint32_t layer, Weight weight) const;
  // The layer was computed: its buffer is free from then on.
  void computed(std::uint32_t layer, Seconds when);

 private:
  struct Pieces {
    std::uint32_t first, last;
  };
  struct Buffer {
    std::vector<Seconds> arrived;  // by piece
    Seconds computed;
    std::uint32_t layer = ~0u;
  };

  // Where a layer's weight lies; none: the layer has no such weight.
  const std::optional<Pieces>& pieces_of(Weight weight) const {
    return pieces_[static_cast<std::size_t>(weight)];
  }

  WeightLayout layout_;
  std::vector<double> shares_;                          // by piece
  std::array<std::optional<Pieces>, kWeights> pieces_;  // what `arrived` would look up for each layer
  std::vector<bool> streamed_;  // by layer
  std::array<Buffer, 2> buffers_;
  std::size_t fetched_layers_ = 0;
};

}  // namespace poise
