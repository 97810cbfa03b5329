#pragma once
// By which policy and plan a run goes on: the planning problem as it stands at a start, a swap or a
// takeover (memory/planning_problem.h), and its solution. Every way to a plan leads through here.

#include <memory>
#include <optional>
#include <string>

#include "planner/memory/planning_problem.h"
#include "planner/memory/policy_swap.h"
#include "planner/process/run.h"

namespace poise {

struct PlanInForce {
  PolicyWish wish;  // names the policy and its options
  std::unique_ptr<Policy> policy;
  std::shared_ptr<const Profile> profile;  // of the device; null: costs are not known
  RunPlan plan;
  // What the device's buffers are made for: the plan's, or those for the time until the border rests.
  DeviceLimits device;

  PackLimits pack() const { return pack_limits(plan.batch, device); }
  ScheduleLimits schedule() const { return schedule_limits(plan.demand, plan.host, device); }
};

// The policy that the wish names, deciding by its machine's costs or else by `profile`. Fails where there
// is none, or its options do not belong to it.
std::unique_ptr<Policy> make_policy_as(const PolicyWish& wish, const Run& run,
                                       const std::shared_ptr<const Profile>& profile);

// `requests`: not answered yet. `given_back`: host memory that a pool takes now and a new one could have.
// REQUIRES: the executor has greeted.
PlanningProblem planning_problem(const Run& run, const std::vector<const Request*>& requests,
                                 const std::shared_ptr<const Profile>& profile,
                                 const FixedResources& fixed, Bytes given_back = {});

// The plan for a pool that stands: the one kept for it under the same policy, or else a new one. Fails
// where the policy has no room in it.
RunPlan plan_with_pool(const Run& run, const PlanInForce& in_force, const FixedResources& fixed);

// What the plan cannot have while the pools stand, compared with the plan for pools made anew, in words;
// empty where that is nothing.
std::string held_back(const RunPlan& plan, const RunPlan& anew);

// RUN/plan.json: the plan in force, for a planner that takes over under the same policy. A disk that does
// not take it is no trouble: the next planner plans anew.
void keep_plan(const Run& run, const PlanInForce& in_force, std::uint64_t pool_epoch);

}  // namespace poise
