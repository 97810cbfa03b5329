#pragma once
// The general program of common/README section 5: where weights and context lie so that an iteration takes
// least, max(link, computation, way back), summed over the layers. Free are the layers whose weights
// stay on the device, and ACT and KV blocks on the device and on the host; both memories, whole
// blocks and the device's buffers, which depend on the kinds, are the bounds. Unlike Algorithm 1 it
// charges ACT blocks their way over the link, and all sizes are the model's: where queries share keys
// an ACT block may be the larger one. Pure functions.

#include <cstdint>
#include <optional>

#include "planner/costs/cost_model.h"
#include "planner/policies/policy.h"
#include "planner/policies/work_time.h"

namespace poise {

// Of so many blocks of each kind, those on the device, and the layers, for which an iteration takes
// least; nothing where they do not fit. Exact.
std::optional<Allocation> best_placement(const Profile& profile, const AllocationInputs& inputs,
                                         std::int64_t act_blocks, std::int64_t kv_blocks);

// As many blocks as the requests can fill, or as fit; the share of ACT blocks for which an iteration
// takes least time per block. Up to kEveryShare blocks every number of ACT blocks is tried; beyond,
// since the time is convex but for roundings, ever finer grids around the best, down to the block.
inline constexpr std::int64_t kEveryShare = 256;
Allocation best_allocation(const Profile& profile, const AllocationInputs& inputs);

}  // namespace poise
