#pragma once
// The weights in an order's fetches. Pure.

#include <span>

#include "common/messages_generated.h"
#include "common/units.h"
#include "common/weight_layout.h"

namespace poise {

// Whether the fetches bring some of a layer's weight. An order that computes the layer has such fetches
// only behind the blocks of its first mini-batch: those cross the link before, so what needs the blocks
// alone is computed before what needs the weight.
bool fetches(std::span<const messages::WeightFetch> fetched, const WeightLayout& layout,
             LayerId layer, Weight weight);

}  // namespace poise
