#pragma once
// A placement's estimated time, without virtual time: an iteration's by its costs, and the whole job's
// by its iterations. Pure functions.

#include <algorithm>
#include <cstdint>

#include "planner/costs/cost_model.h"
#include "planner/policies/policy.h"

namespace poise {

// An iteration in which each request generates one token, halfway through its answer.
struct IterationTime {
  Seconds link, compute, back;
  Seconds host{};  // host cores, with the products that come before and behind their attention

  Seconds longest() const { return std::max({link, compute, back, host}); }
};
IterationTime iteration_time(const Profile& profile, const AllocationInputs& inputs,
                             const Allocation& blocks);

// Lower bounds of the times of iterations.
Rehearsed least_times(const Profile& profile, const AllocationInputs& inputs,
                      const Allocation& blocks);

// All requests from prompt to answer, in iterations of such times. If not all have room at a time, it
// is the longer of two cases: each request that ends makes room for the next; or requests end together
// and run in rounds, where those of the last round began while contexts were short and already have half
// of their answers.
double work_time(const Profile& profile, const AllocationInputs& inputs, const Allocation& blocks,
                 const Rehearsed& times);

// The number of requests over the number that have room at a time, rounded up. Placements with equal
// rounds differ as `work_time` says; others also by which request waits for which, so compare those by
// rehearsal.
std::int64_t rounds_of(const AllocationInputs& inputs, const Allocation& blocks);

}  // namespace poise
