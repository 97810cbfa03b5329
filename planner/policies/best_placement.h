#pragma once
// The general program of common/README section 5: places weights and context so that an iteration takes
// the least time, max(link to device, computation, link to host), summed over the layers. The variables
// are the layers whose weights stay on the device, and the ACT and KV blocks on the device and on the
// host. The constraints are both memories, whole blocks, and the device's buffers, which depend on the
// kinds. Unlike Algorithm 1 it charges ACT blocks for their transfer. All sizes are the model's: with
// grouped queries an ACT block may be the larger one. Pure functions.

#include <cstdint>
#include <optional>

#include "planner/costs/cost_model.h"
#include "planner/policies/policy.h"
#include "planner/policies/work_time.h"

namespace poise {

// For given numbers of blocks of each kind: how many of them and of the layers go on the device so that
// an iteration takes the least time; nothing if they do not fit. Exact.
std::optional<Allocation> best_placement(const Profile& profile, const AllocationInputs& inputs,
                                         std::int64_t act_blocks, std::int64_t kv_blocks);

// As many blocks as the requests can fill or as fit, with the share of ACT blocks that gives the least
// time per block. Up to kEveryShare blocks it tries every number of ACT blocks; above, since the time is
// convex except for rounding, it refines a grid around the best number down to one block.
inline constexpr std::int64_t kEveryShare = 256;
Allocation best_allocation(const Profile& profile, const AllocationInputs& inputs);

}  // namespace poise
