#pragma once
// How many requests are under way at a time. Where weights are streamed, the more the better: an
// iteration brings them once for all. Where most of them stay on the device, few requests may have all
// their context there, too, and then next to nothing waits for the link.

#include <cstdint>
#include <functional>

#include "planner/arrangement.h"

namespace poise {

// `most`, or the number below it, from --min-num-seqs on, with which the profile has all of the work done soonest by a good
// part; only for a policy that leaves the number to us (Policy::any_number). `demand_of`: what so many
// at a time ask for. Pure; takes as long as a handful of arrangements.
std::int32_t requests_at_a_time(const Policy& policy, const Profile& profile,
                                const ModelShape& shape, DType dtype, std::int32_t most,
                                const std::function<Demand(std::int32_t)>& demand_of,
                                const BatchOptions& options, const BlockBudget& budget,
                                const RunDevice& device);

}  // namespace poise
