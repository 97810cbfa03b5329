#pragma once
// Which policy a run goes by: the one it starts with, and another one while it goes on. A wish
// (memory/policy_swap.h) is solved as a planning problem with what stands; the border of the pool then
// follows as blocks free up. A wish that cannot be fulfilled is answered with the reason, and the run
// keeps its policy. One thread.

#include <memory>
#include <optional>
#include <string>

#include "common/trouble.h"
#include "planner/process/plan_in_force.h"
#include "planner/process/run.h"
#include "planner/process/run_loop.h"

namespace poise {

class PolicyChange {
 public:
  PolicyChange(Run& run, PlanInForce& in_force);

  // Before the first plan: the last wish where this planner takes over, which may be why it does, or
  // where that cannot be had the one before it; else `by_default`. Does nothing where a policy is there.
  void choose(const PolicyWish& by_default);
  // Whether the policy is a wish that came with this planner and is not in force yet.
  bool is_untried() const { return untried_.has_value(); }
  // There is room for it; or there is not, and `choose` has another go at what is left.
  void accept();
  void refuse(const Failure& refusal);

  enum class Next { go_on, wait, configure, rebuild };
  // Between two iterations: obeys a new wish, moves the border, and says what comes first.
  // `rebuild`: the plan in force is for pools that must be made anew.
  Next step(RunLoop& loop);
  // The plan in force is for another split than the pool has.
  void begin_border_move() { border_moves_ = true; }

  // To the log of orders.
  void log_policy(std::uint64_t iteration) const;
  void log_pool() const;

 private:
  // For a planner that takes over.
  void record(const PolicyWish& wish) const;
  bool border_rests(RunLoop& loop);
  Next obey(RunLoop& loop);
  Next swap_to(const PolicyWish& wish, std::unique_ptr<Policy> policy, RunLoop& loop);
  Next rebuild_for(const PolicyWish& wish, std::unique_ptr<Policy> policy, RunLoop& loop);
  Next move_border(RunLoop& loop);

  Run& run_;
  PlanInForce& in_force_;
  PolicyWishes wishes_;
  std::optional<PolicyWish> untried_;
  bool border_moves_ = false;  // it is not, or was not a moment ago, where the plan wants it
  Seconds border_moved_{0};
};

}  // namespace poise
