#pragma once
// How long the link is idle in a layer because its next loads wait for a free side: there it can carry weights without
// delaying blocks (schedule/weight_stream.h). Pure.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "common/row_groups.h"
#include "planner/virtual_time/batch_cost.h"

namespace poise {

// Behind each mini-batch's loads, in the last of `layers` layers that have the same mini-batches and whose weights are all on the
// device. Behind the last mini-batch that loads: in the layer before that. `products`: by group. A mini-batch that host cores attend loads nothing, so nothing is idle behind it. Left out are
// stores, how long queries take to host cores, the pace of link and host cores beside each other, and the latency of events.
std::vector<Seconds> link_idle(std::span<const BatchCost> costs, std::span<const RowGroup> groups,
                               std::span<const GroupCost> products, std::size_t sides,
                               std::int32_t layers);

}  // namespace poise
