#include "planner/memory/overlap.h"

#include <algorithm>
#include <optional>
#include <span>
#include <vector>

#include "common/trouble.h"
#include "planner/virtual_time/rehearsal.h"

namespace poise {
namespace {

constexpr std::int32_t kFewestRows = 64;
constexpr double kWorthIt = 0.98;         // of the time with all rows and two sides, in both cases together
constexpr double kHopeless = 1.1;         // of the best: with fewer rows still it only gets worse
constexpr std::int64_t kRefills = 4;      // of the requests at a time: more of them tell no more
constexpr std::int32_t kEarlyAnswer = 4;  // an answer that ends early has a quarter of max_tokens

// How long the whole job takes, or a part of it that is long enough to compare plans.
struct WholeTimes {
  double full = 0, early = 0;
};

class WholeJobs {
 public:
  WholeJobs(const Policy& policy, const PlanningProblem& problem)
      : policy_(policy),
        problem_(problem),
        early_(problem.requests),
        layout_(weight_layout(problem.shape, problem.dtype)) {
    for (RequestSize& one : early_) {
      one.answer = (one.answer + kEarlyAnswer - 1) / kEarlyAnswer;
    }
  }

  // Nothing where it is too long to rehearse.
  std::optional<WholeTimes> of(const RunPlan& plan) const {
    const auto full = time(plan, problem_.requests), early = time(plan, early_);
    return full && early ? std::optional(WholeTimes{.full = full->n, .early = early->n})
                         : std::nullopt;
  }

 private:
  std::optional<Seconds> time(const RunPlan& plan, std::span<const RequestSize> requests) const {
    const Demand demand = demand_of(requests, plan.demand.sequences, problem_.kept,
                                    problem_.batch.prefill_tokens);
    Rehearsal job = rehearsal_of(problem_.shape, demand, plan.host, plan.device, plan.batch);
    job.requests = std::min(job.requests, kRefills * std::int64_t{demand.sequences});
    return rehearse_job(*problem_.profile, policy_, layout_, job);
  }

  const Policy& policy_;
  const PlanningProblem& problem_;
  std::vector<RequestSize> early_;
  const WeightLayout layout_;
};

bool all_run_at_a_time(const RunPlan& plan) {
  return plan.demand.requests <= plan.demand.sequences && plan.blocks() >= plan.demand.most_blocks;
}

using Plan = std::function<RunPlan(const PlanningProblem&)>;

std::optional<RunPlan> plan_if_it_fits(const Plan& plan, const PlanningProblem& problem) {
  try {
    return plan(problem);
  } catch (const Failure&) {  // the device has no room for another side
    return std::nullopt;
  }
}

}  // namespace

RunPlan plan_by_overlap(const Policy& policy, PlanningProblem problem,
                        const std::function<RunPlan(const PlanningProblem&)>& plan) {
  const bool any_rows = !problem.batch.prompt_rows, any_sides = !problem.batch.sides;
  problem.batch.prompt_rows = problem.batch.prompt_rows.value_or(problem.batch.prefill_tokens);
  problem.batch.sides = problem.batch.sides.value_or(kFewestSides);
  RunPlan best = plan(problem);
  if (!problem.profile || !(any_rows || any_sides)) {
    return best;
  }
  const WholeJobs jobs(policy, problem);
  const auto first = jobs.of(best);
  if (!first) {
    return best;
  }
  double least = kWorthIt;
  // Whether it is nearly as good as the best.
  const auto try_with = [&](std::int32_t rows, std::int32_t sides) {
    problem.batch.prompt_rows = rows;
    problem.batch.sides = sides;
    const auto other = plan_if_it_fits(plan, problem);
    const auto times = other ? jobs.of(*other) : std::nullopt;
    if (!times) {
      return false;
    }
    const double full = times->full / first->full, early = times->early / first->early;
    if (std::max(full, early) <= 1 && full * early < least) {
      least = full * early;
      best = *other;
    }
    return full * early < kHopeless * least;
  };
  if (any_sides) {
    try_with(*best.batch.prompt_rows, kMostSides);
  }
  if (any_rows && !all_run_at_a_time(best)) {
    const std::int32_t most =
        schedule_limits(best.batch, best.demand, best.host, best.device).prefill_rows;
    std::int32_t rows = most / 2;
    while (rows >= kFewestRows && try_with(rows, *best.batch.sides)) {
      rows /= 2;
    }
    if (any_sides && best.batch.sides == kFewestSides) {
      try_with(*best.batch.prompt_rows, kMostSides);
    }
  }
  return best;
}

}  // namespace poise
