#pragma once
// The general program (best_placement.h) with host cores as a third resource: some of the requests under way
// are attended on host cores, from KV blocks of the host; the others' blocks are placed as if these were all
// there is, in the memory that is left. An iteration takes max(link to device, computation, host cores,
// link to host). Pure functions.

#include <cstdint>
#include <optional>

#include "planner/costs/cost_model.h"
#include "planner/policies/policy.h"

namespace poise {

// The requests that host cores do not attend, and what is left for them; nothing if host memory does not
// hold the others' blocks. REQUIRES: at most `inputs.sequences` requests.
std::optional<AllocationInputs> beside_host(const AllocationInputs& inputs, std::int32_t on_host);
// Their placement together with the blocks of those that host cores attend.
Allocation with_host(const AllocationInputs& rest, Allocation blocks);

// The least of work_time's bounds over the number of requests on host cores and the number of ACT blocks of
// the others. Up to kEveryShare blocks it tries all numbers of both, above that a grid, refined around the
// best. REQUIRES: the profile knows host cores.
Allocation best_three_way(const Profile& profile, const AllocationInputs& inputs);

// best_allocation, or a placement with host cores if its rehearsal takes less time. Without host cores, or
// if their times are not known, or without rehearsals: best_allocation.
Allocation best_with_host(const Profile& profile, const AllocationInputs& inputs);

}  // namespace poise
