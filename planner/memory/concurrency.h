#pragma once
// Chooses how many requests are under way at a time. If weights are streamed, more is better: an
// iteration brings them once for all requests. If most weights stay on the device, few requests can
// have all their context there too, and then hardly any work waits for the link.

#include <cstdint>
#include <optional>

#include "planner/memory/memory_plan.h"
#include "planner/memory/planning_problem.h"

namespace poise {

struct Concurrency {
  std::int32_t sequences = 0;  // under way at a time
  std::optional<MemoryPlan> memory = std::nullopt;  // for that number, if it was made on the way
};

// The largest number the user allows, or a smaller one with which the whole job is clearly faster by the
// profile's costs (at least --min-num-seqs and the requests that run already). Smaller numbers only for
// policies that allow it (Policy::chooses_concurrency). The length of answers is not known, only their
// maximum: a smaller number must be clearly faster both if answers reach it and if they end early, and
// the best number is the best over both together. A part of planning_problem.h's `solve`. Pure; takes as
// long as ten to twenty memory plans. REQUIRES: the problem has a profile.
Concurrency choose_concurrency(const Policy& policy, const PlanningProblem& problem);

}  // namespace poise
