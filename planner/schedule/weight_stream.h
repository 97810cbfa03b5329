#pragma once
// Which pieces of weights each order of an iteration fetches ahead (common/README section 4). Resident
// layers (common/device_memory.h says which) stay on the device; the others pass through two
// buffers in turn, so that a layer can be fetched once the layer two uses before it was computed.
// Its pieces are spread, by their bytes, over the orders from then until it is used. Within an order they
// go where the link would be idle, as far as that is known (LinkIdle), and the rest evenly between the
// loads of blocks. At the end of an iteration, before the next one is planned, the first two streamed layers
// of the next are fetched. One or two streamed layers stay in the two buffers.

#include <cstdint>
#include <vector>

#include "common/device_memory.h"
#include "common/messages_generated.h"
#include "common/units.h"
#include "common/weight_layout.h"

namespace poise {

// When the link would have nothing to carry in a layer whose weights are on the device already.
struct LinkIdle {
  std::vector<Seconds> behind;  // by mini-batch: between its loads and those of the next
  Seconds weights;              // that a layer's weights take
};

class WeightStream {
 public:
  WeightStream(const WeightLayout& layout, const DeviceLimits& limits);

  // What the order of `stage` fetches (0 embeds, 1 .. L are layers, L + 1 is the head). Call once
  // for each stage of an iteration, in order. `last_iteration`: none follows. `idle`: in a layer; empty: not known. Where no layer
  // is computed, pieces are spread evenly.
  std::vector<messages::WeightFetch> next(std::uint32_t stage, std::uint32_t mini_batches,
                                          bool last_iteration, const LinkIdle& idle = {});
  bool streams() const { return !streamed_.empty(); }

 private:
  struct Piece {
    double start, share;  // of a layer's bytes: before it and in it
  };
  struct PlannedFetch {
    std::uint32_t layer, piece;
    double place;         // within the order's mini-batches, 0 .. 1
    bool next_iteration;  // needed only if there is one
  };

  // For each mini-batch the share of an order's weights that have been fetched by the end of what is queued behind it.
  std::vector<double> shares(std::uint32_t stage, std::uint32_t mini_batches,
                             const LinkIdle& idle) const;
  // All pieces of a layer, spread over the orders of stages first .. last.
  void spread(std::uint32_t layer, std::uint32_t first, std::uint32_t last, bool next_iteration);

  std::vector<Piece> pieces_;
  std::vector<std::uint32_t> streamed_;              // layers
  std::vector<std::vector<PlannedFetch>> by_stage_;  // once the first two streamed layers are there
  bool first_two_fetched_ = false;                   // for the iteration that comes next
};

}  // namespace poise
