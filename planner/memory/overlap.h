#pragma once
// Chooses what hides prompts under the link: how many rows of prompts run in an iteration beside requests that
// generate (ScheduleLimits::prompt_rows), and how many sides loads have (DeviceLimits::sides). As many rows as fit are
// right where all requests begin together, or where more requests share the weights that an iteration streams. Where
// requests take each other's places, fewer are often better: they then begin and end one after the other, and each
// iteration computes the prompts of some while the link brings the context of others. A third side takes memory
// of the device from weights and context. A part of planning_problem.h's `solve`. Pure functions.

#include <functional>

#include "planner/memory/planning_problem.h"

namespace poise {

// The plan of the shortest whole job in virtual time, over both numbers where the problem leaves them open. One that
// differs from all rows and two sides must be clearly faster for answers of max_tokens, and no slower if they end early.
// Without a profile, or where the job is too long to rehearse: all rows, two sides. `plan`: the plan for both as given.
RunPlan plan_by_overlap(const Policy& policy, PlanningProblem problem,
                        const std::function<RunPlan(const PlanningProblem&)>& plan);

}  // namespace poise
