#include "gpu_executor/layer_ledger.h"

#include <algorithm>

#include "common/trouble.h"
#include "common/weight_layout.h"

namespace poise {

LayerLedger::LayerLedger(const DeviceLimits& limits, std::int32_t layers, std::int32_t pieces)
    : limits_(limits), layers_(layers), all_pieces_((std::uint64_t{1} << pieces) - 1) {
  check(pieces > 0 && pieces <= kMaxWeightPieces, "a layer has few pieces");
}

LayerLedger::Held* LayerLedger::find(LayerId layer, State state) {
  const auto found = std::ranges::find_if(
      buffers_, [&](const Held& held) { return held.layer == layer && held.state == state; });
  return found == buffers_.end() ? nullptr : &*found;
}

// The one freed first.
LayerLedger::Held& LayerLedger::take_free(LayerId layer, State state) {
  Held& held = *std::ranges::min_element(buffers_, {}, [](const Held& one) {
    return one.state == State::free ? one.since : UINT64_MAX;
  });
  if (held.state != State::free) {
    fail("wants layer {} while both layer buffers hold layers not computed yet ({} and {})",
         layer.n, buffers_[0].layer->n, buffers_[1].layer->n);
  }
  held = {.layer = layer, .pieces = 0, .state = state, .since = held.since};
  return held;
}

int LayerLedger::fetch(LayerId layer, std::uint32_t piece) {
  if (layer.n >= static_cast<std::uint32_t>(layers_)) {
    fail("fetches layer {} of a model of {}", layer.n, layers_);
  }
  if (piece >= kMaxWeightPieces || (all_pieces_ >> piece & 1) == 0) {
    fail("fetches piece {} of layer {}, which it does not have", piece, layer.n);
  }
  if (!streamed(layer)) {
    fail("fetches layer {}, which is resident", layer.n);
  }
  Held* held = find(layer, State::in_use);
  if (held == nullptr || held->pieces == all_pieces_) {  // for a later order
    held = find(layer, State::filling);
    held = held != nullptr ? held : &take_free(layer, State::filling);
  }
  if ((held->pieces >> piece & 1) != 0) {
    fail("fetches piece {} of layer {} a second time", piece, layer.n);
  }
  held->pieces |= std::uint64_t{1} << piece;
  return index(*held);
}

int LayerLedger::use(LayerId layer) {
  Held* held = find(layer, State::filling);
  if (held == nullptr) {
    held = find(layer, State::free);  // still there from an earlier order
  }
  if (held == nullptr) {
    held = &take_free(layer, State::in_use);
  }
  held->state = State::in_use;
  return index(*held);
}

void LayerLedger::check_complete(int buffer) const {
  const Held& held = buffers_[static_cast<std::size_t>(buffer)];
  if (held.pieces != all_pieces_) {
    fail(
        "computes layer {}, whose weights were not all fetched by orders before it or behind its "
        "first mini-batch",
        held.layer->n);
  }
}

void LayerLedger::used(int buffer) {
  Held& held = buffers_[static_cast<std::size_t>(buffer)];
  held.state = State::free;
  held.since = ++uses_;
}

void LayerLedger::abandon() {
  for (Held& held : buffers_) {
    if (held.state == State::filling) {
      held = {.layer = std::nullopt, .pieces = 0, .state = State::free, .since = held.since};
    }
  }
}

}  // namespace poise
