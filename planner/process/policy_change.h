#pragma once
// The policy of a run: the first one, and changes during the run. A wish (memory/policy_swap.h) is solved
// as a planning problem with the existing resources; then the pool's border follows as blocks become
// free. If a wish cannot be fulfilled, the answer gives the reason, and the run keeps its
// policy. One thread.

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

  // Before the first plan: if this planner takes over, the last wish (which may be the reason for the
  // takeover) or, if that is refused, the wish before it; otherwise `by_default`. Does nothing if there is
  // a policy already.
  void choose(const PolicyWish& by_default);
  // Whether the policy is a wish that came with this planner and is not yet in force.
  bool is_untried() const { return untried_.has_value(); }
  // There is room for it; or there is none, and `choose` tries the remaining ones.
  void accept();
  void refuse(const Failure& refusal);

  enum class Next { go_on, wait, configure, rebuild };
  // Between two iterations: fulfils a new wish, moves the border, and says what must happen first.
  // `rebuild`: the plan in force is for pools that must be made anew.
  Next step(RunLoop& loop);
  // Whether the plan in force is for another split than the pool has.
  void begin_border_move() { border_moves_ = true; }

  // Writes to the order log.
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
