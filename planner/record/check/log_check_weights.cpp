#include "planner/record/check/log_check_weights.h"

#include <fmt/core.h>

#include <algorithm>

#include "common/device_memory.h"

namespace poise {

void CheckedWeights::configure(std::int32_t resident_layers) {
  resident_layers_ = resident_layers;
  buffers_ = {};
}

// Of what the buffers hold.
void CheckedWeights::violation(const std::string& where, const std::string& what) {
  if (trusted_ == 0) {
    report_.add_violation(where, what);
  }
}

bool CheckedWeights::streamed(std::uint32_t layer) const {
  return !is_resident({.resident_layers = resident_layers_}, LayerId{layer}, layers_);
}

CheckedWeights::LayerBuffer* CheckedWeights::find(std::uint32_t layer, LayerBuffer::State state) {
  const auto found = std::ranges::find_if(buffers_, [&](const LayerBuffer& buffer) {
    return buffer.layer == layer && buffer.state == state;
  });
  return found == buffers_.end() ? nullptr : &*found;
}

// The one that was computed from first; nothing where both are needed.
CheckedWeights::LayerBuffer* CheckedWeights::take_idle(std::uint32_t layer,
                                                       LayerBuffer::State state) {
  LayerBuffer* oldest = nullptr;
  for (LayerBuffer& buffer : buffers_) {
    if (buffer.state == LayerBuffer::State::idle &&
        (oldest == nullptr || buffer.used < oldest->used)) {
      oldest = &buffer;
    }
  }
  if (oldest != nullptr) {
    *oldest = {.state = state, .layer = layer, .pieces = {}, .used = oldest->used};
  }
  return oldest;
}

void CheckedWeights::fetch(const messages::WeightFetch& fetch, const std::string& where) {
  ++report_.pieces_fetched;
  const std::uint32_t layer = fetch.layer();
  if (layer >= static_cast<std::uint32_t>(layers_) || fetch.piece() >= pieces_ ||
      !streamed(layer)) {
    report_.add_violation(
        where, fmt::format("fetches piece {} of layer {}, which is none that is streamed",
                           fetch.piece(), layer));
    return;
  }
  LayerBuffer* buffer = find(layer, LayerBuffer::State::computes);
  if (buffer == nullptr || buffer->pieces.size() == pieces_) {
    buffer = find(layer, LayerBuffer::State::waits);
  }
  if (buffer == nullptr) {
    buffer = take_idle(layer, LayerBuffer::State::waits);
  }
  if (buffer == nullptr) {
    violation(where, fmt::format("fetches layer {} while both buffers hold others", layer));
  } else if (!buffer->pieces.insert(fetch.piece()).second) {
    violation(where, fmt::format("fetches piece {} of layer {} twice", fetch.piece(), layer));
  }
}

void CheckedWeights::take(const messages::LayerOrderT& order, const std::string& where) {
  const bool layer = order.stage >= 1 && order.stage <= static_cast<std::uint32_t>(layers_);
  LayerBuffer* used = nullptr;
  if (layer && streamed(order.stage - 1)) {
    used = find(order.stage - 1, LayerBuffer::State::waits);
    used = used != nullptr ? used : find(order.stage - 1, LayerBuffer::State::idle);
    used = used != nullptr ? used : take_idle(order.stage - 1, LayerBuffer::State::computes);
    if (used != nullptr) {
      used->state = LayerBuffer::State::computes;
    }
  }
  for (const bool first : {true, false}) {  // the first mini-batch's are there when it is computed
    for (const messages::WeightFetch& one : order.fetch) {
      if (order.mini_batches.empty() ||
          (one.after_mini_batch() == order.mini_batches.front()) != first) {
        continue;
      }
      fetch(one, where);
    }
    if (first && layer && streamed(order.stage - 1) &&
        (used == nullptr || used->pieces.size() < pieces_)) {
      violation(where,
                fmt::format("layer {} is computed with {} of its {} pieces of weights",
                            order.stage - 1, used == nullptr ? 0 : used->pieces.size(), pieces_));
    }
  }
  if (used != nullptr) {
    used->state = LayerBuffer::State::idle;
    used->used = ++uses_;
  }
}

}  // namespace poise
