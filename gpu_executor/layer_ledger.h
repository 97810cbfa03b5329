#pragma once
// Records which streamed layer is in which of the two layer buffers; it moves no data. A layer's
// pieces are fetched by orders before the one that computes it, or by that order itself behind its
// first mini-batch's loads (regeneration then starts on the first pieces while the rest arrives, KVPR
// section 3.3). A buffer is free for another layer once an order has computed from it. The order check
// keeps a ledger to refuse impossible orders; WeightsOnDevice keeps one to place accepted pieces.

#include <array>
#include <cstdint>
#include <optional>

#include "common/device_memory.h"
#include "common/units.h"

namespace poise {

class LayerLedger {
 public:
  // `pieces`: of each layer, at most kMaxWeightPieces (common/weight_layout.h).
  LayerLedger(const DeviceLimits& limits, std::int32_t layers, std::int32_t pieces);

  bool streamed(LayerId layer) const { return !is_resident(limits_, layer, layers_); }
  // The buffer a piece goes to. Fails where the layer is resident, the piece was fetched already,
  // or both buffers hold layers that no order has computed yet.
  int fetch(LayerId layer, std::uint32_t piece);
  // An order begins to compute a streamed layer, from this buffer. Pieces may still be missing …
  int use(LayerId layer);
  // … until its first mini-batch is computed: fails where one is.
  void check_complete(int buffer) const;
  // The order is over: the buffer may take another layer.
  void used(int buffer);
  // Layers that were fetched and not computed are forgotten.
  void abandon();

 private:
  // free: computed from (its layer may still be there and is good), or never filled.
  enum class State : std::uint8_t { free, filling, in_use };
  struct Held {
    std::optional<LayerId> layer;
    std::uint64_t pieces = 0;  // fetched, one bit each
    State state = State::free;
    std::uint64_t since = 0;  // when it was freed, in uses
  };

  Held* find(LayerId layer, State state);
  Held& take_free(LayerId layer, State state);
  int index(const Held& held) const { return static_cast<int>(&held - buffers_.data()); }

  DeviceLimits limits_;
  std::int32_t layers_;
  std::uint64_t all_pieces_;
  std::uint64_t uses_ = 0;
  std::array<Held, 2> buffers_;
};

}  // namespace poise
