#pragma once
// How many requests are under way at a time. Where weights are streamed, the more the better: an
// iteration brings them once for all. Where most of them stay on the device, few requests may have all
// their context there, too, and then next to nothing waits for the link.

#include <cstdint>
#include <span>

#include "planner/memory/memory_plan.h"

namespace poise {

// `most`, or the number below it, from --min-num-seqs on, with which the profile has all of the work
// done soonest by a good part; only for a policy that leaves the number to us (Policy::chooses_concurrency).
// Nobody knows how long answers will be, only how long they may: the number has to be better by that
// part both where they come to their ends and where they end early, and the best by both together.
// Pure; takes as long as ten to twenty memory plans.
std::int32_t choose_concurrency(const Policy& policy, const Profile& profile,
                                const ModelShape& shape, DType dtype, std::int32_t most,
                                std::span<const RequestSize> requests, const BatchOptions& options,
                                const BlockBudget& budget, const RunDevice& device);

}  // namespace poise
