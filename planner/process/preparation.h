#pragma once
// What a planner does before its first iteration, and again where weights were lost or pools are made
// anew: what is to be done, with whom, by which costs and policy, and how large everything is made.
//
//   phase        waits for
//   loading      the loader's weights to be sealed
//   greeting     loader and executor to say Hello, and the host to have all weights that no device has
//   profiling    the executor to be measured; only where costs are wanted that are not known
//   holding      the executor to hold layers whose weights the host gives up for blocks
//   releasing    the loader to have given their memory back: before the pool, which gets it
//   claiming     the pool
//   over         nothing: see is_ready() and is_answered()

#include <memory>
#include <string>

#include "planner/process/hand_over.h"
#include "planner/process/plan_in_force.h"
#include "planner/process/policy_change.h"
#include "planner/process/run.h"
#include "planner/profile/profiler.h"

namespace poise {

class Preparation {
 public:
  Preparation(Run& run, PlanInForce& in_force, PolicyChange& change, HandOver& hand_over)
      : run_(run), in_force_(in_force), change_(change), hand_over_(hand_over) {}

  // Does what can be done now, or waits a moment for it. REQUIRES: it is not over. True where
  // something happened.
  bool step();
  // A pool is there and the plan is in force: the executor is to be configured for it.
  bool is_ready() const { return phase_ == Phase::over && !answered_; }
  // There is nothing to compute: all lines have results.
  bool is_answered() const { return phase_ == Phase::over && answered_; }
  bool is_profiling() const { return phase_ == Phase::profiling; }
  // From the greeting on, with the policy in force if there is one; no block is left.
  void begin_again();

 private:
  enum class Phase { loading, greeting, profiling, holding, releasing, claiming, over };

  bool load();
  void take_stock();
  void begin_greeting();
  bool greet();
  bool host_is_in_order();
  bool find_profile();
  void begin_profiling();
  bool measure();
  void use_profile(Profile profile);
  void decide();
  bool make_room_as_wished();
  bool make_room();
  bool keep_pool();
  void say_plan(bool pool_stands);
  bool hold();
  void claim_pool();

  Run& run_;
  PlanInForce& in_force_;
  PolicyChange& change_;
  HandOver& hand_over_;
  Phase phase_ = Phase::loading;
  bool answered_ = false;
  std::string policy_name_;                // without a wish
  std::unique_ptr<Profiler> profiler_;     // while it measures
  std::unique_ptr<OrderLog> profile_log_;  // likewise
};

}  // namespace poise
