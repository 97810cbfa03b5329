#pragma once
// How many requests are under way at a time. Where weights are streamed, the more the better: an
// iteration brings them once for all. Where most of them stay on the device, few requests may have all
// their context there, too, and then next to nothing waits for the link.

#include <cstdint>

#include "planner/memory/planning_problem.h"

namespace poise {

// As many as the user allows, or the number below it, from --min-num-seqs and the requests that run
// already on, with which the profile has all of the work done soonest by a good part; only for a policy
// that leaves the number to us (Policy::chooses_concurrency). It is not known how long answers will be,
// only how long they may: the number has to be better by that part both where they come to their ends
// and where they end early, and the best by both together. A part of planning_problem.h's `solve`.
// Pure; takes as long as ten to twenty memory plans. REQUIRES: the problem has a profile.
std::int32_t choose_concurrency(const Policy& policy, const PlanningProblem& problem);

}  // namespace poise
