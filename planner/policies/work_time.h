#pragma once
// What a placement is worth, counted and not played: an iteration's time by its costs, and all of the
// work's by its iterations. Pure functions.

#include <algorithm>
#include <cstdint>

#include "planner/costs/cost_model.h"
#include "planner/policies/policy.h"

namespace poise {

// An iteration in which each request generates one token, halfway through its answer.
struct IterationTime {
  Seconds link, compute, back;

  Seconds longest() const { return std::max({link, compute, back}); }
};
IterationTime iteration_time(const Profile& profile, const AllocationInputs& inputs,
                             const Allocation& blocks);

// Times that no iterations come below.
Rehearsed least_times(const Profile& profile, const AllocationInputs& inputs,
                      const Allocation& blocks);

// All requests from prompt to answer, in iterations of such times. Where not all have room at a time,
// whoever ends makes room for the next, or, if they end together, they come in rounds, the last one of
// those that are left (which began while contexts were short, and have half of their answers by
// then): whichever takes longer.
double work_time(const Profile& profile, const AllocationInputs& inputs, const Allocation& blocks,
                 const Rehearsed& times);

// How many times as many requests there are as have room at a time, rounded up: placements alike in
// this differ as `work_time` says, others also by who waits for whose end, which only playing tells.
std::int64_t rounds_of(const AllocationInputs& inputs, const Allocation& blocks);

}  // namespace poise
