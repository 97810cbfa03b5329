#pragma once
// Where everything of a run lies, for so many requests at a time: blocks on the host and on the device,
// the device's buffers, and whether the host keeps the weights of layers that stay on the device. Those
// are there twice; where requests find too few blocks, the host's copy goes to blocks. A part of
// planning_problem.h's `solve`. Pure functions.

#include <cstdint>

#include "planner/memory/planning_problem.h"

namespace poise {

struct MemoryPlan {
  Allocation host;
  DeviceLimits device;
  Bytes overhead;  // of the device, with the page tables of what is pinned
  std::int32_t released_layers = 0;
};

// Of the problem's requests, `demand` counts. Fails, with numbers, where host or device are too small.
MemoryPlan plan_memory(const Policy& policy, const PlanningProblem& problem, const Demand& demand);

}  // namespace poise
