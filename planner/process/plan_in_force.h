#pragma once
// The policy and plan of a run: the planning problem at a start, a swap or a takeover
// (memory/planning_problem.h), and its solution. Every plan is made here.

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
  // The device's buffers: the plan's, or those needed until the border has moved to its place.
  DeviceLimits device;

  PackLimits pack() const { return pack_limits(plan.batch, device); }
  ScheduleLimits schedule() const {
    return schedule_limits(plan.batch, plan.demand, plan.host, device);
  }
};

// The policy that the wish names, deciding by its machine's costs, otherwise by `profile`. Fails if there
// is no such policy or an option does not belong to it.
std::unique_ptr<Policy> make_policy_as(const PolicyWish& wish, const Run& run,
                                       const std::shared_ptr<const Profile>& profile);

// `requests`: not answered yet. `given_back`: host memory that a pool takes now and a new one could have.
// REQUIRES: the executor has greeted.
PlanningProblem planning_problem(const Run& run, const std::vector<const Request*>& requests,
                                 const std::shared_ptr<const Profile>& profile,
                                 const FixedResources& fixed, Bytes given_back = {});

// The plan for an existing pool: the one kept for it under the same policy, otherwise a new one. Fails
// if the policy does not fit into the pool.
RunPlan plan_with_pool(const Run& run, const PlanInForce& in_force, const FixedResources& fixed);

// What the plan lacks while the pools stay as they are, compared with the plan for new pools, in words;
// empty if it lacks nothing.
std::string held_back(const RunPlan& plan, const RunPlan& anew);

// RUN/plan.json: the plan in force, for a planner that takes over under the same policy. A disk error is
// ignored: the next planner then makes a new plan.
void keep_plan(const Run& run, const PlanInForce& in_force, std::uint64_t pool_epoch);

}  // namespace poise
