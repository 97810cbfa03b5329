#pragma once
// Where everything of a run lies, for a given number of requests at a time: blocks on the host and on
// the device, the device's buffers, and whether the host keeps the weights of layers that stay on the
// device. Those weights exist twice; if there are too few blocks for the requests, blocks replace the
// host's copy. A part of planning_problem.h's `solve`. Pure functions.

#include <cstdint>

#include "planner/memory/planning_problem.h"

namespace poise {

struct MemoryPlan {
  Allocation host;
  DeviceLimits device;
  Bytes overhead;  // of the device, with the page tables of pinned memory
  std::int32_t released_layers = 0;
};

// `demand`: what the problem's requests need. Fails with numbers if host or device are too small.
MemoryPlan plan_memory(const Policy& policy, const PlanningProblem& problem, const Demand& demand);

}  // namespace poise
