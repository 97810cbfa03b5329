#pragma once
// How long the link is idle in a layer because its next loads wait for a free side: there it can carry weights without
// delaying blocks (schedule/weight_stream.h). Pure.

#include <cstddef>
#include <span>
#include <vector>

#include "common/row_groups.h"
#include "planner/virtual_time/batch_cost.h"

namespace poise {

// Behind each mini-batch's loads, in a layer that follows one with the same mini-batches, all weights being there. `products`: by
// group. A mini-batch that host cores attend loads nothing, so nothing is idle behind it.
std::vector<Seconds> link_idle(std::span<const BatchCost> costs, std::span<const RowGroup> groups,
                               std::span<const GroupCost> products, std::size_t sides);

}  // namespace poise
