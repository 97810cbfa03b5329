#pragma once
// What a planner does before its first iteration, and again after weights were lost or for new pools: it
// finds what is to be done, meets loader and executor, and chooses costs, policy and sizes.
//
//   phase        waits for
//   loading      the loader's weights to be sealed
//   greeting     loader and executor to say Hello, and the host to have all weights that no device has
//   unmapping    the executor to unmap the pool that is made anew, whose memory the next plan may use
//   profiling    the executor to be measured; only if costs are needed and not known
//   holding      the executor to hold layers whose weights the host frees for blocks
//   releasing    the loader to give their memory back, which the pool then gets
//   claiming     the pool
//   over         nothing: see is_ready() and is_answered()

#include <memory>
#include <optional>
#include <string>

#include "planner/links/returned_pool.h"
#include "planner/process/hand_over.h"
#include "planner/process/plan_in_force.h"
#include "planner/process/policy_change.h"
#include "planner/process/run.h"
#include "planner/process/run_files.h"
#include "planner/profile/cost_measurement.h"

namespace poise {

class Preparation {
 public:
  Preparation(Run& run, PlanInForce& in_force, PolicyChange& change, HandOver& hand_over)
      : run_(run), in_force_(in_force), change_(change), hand_over_(hand_over), files_(run) {}

  // Does what can be done now, or waits a moment. REQUIRES: it is not over. True if something
  // happened.
  bool step();
  // The pool exists and the plan is in force: the executor must be configured for it.
  bool is_ready() const { return phase_ == Phase::over && !answered_; }
  // There is nothing to compute: all lines have results.
  bool is_answered() const { return phase_ == Phase::over && answered_; }
  bool is_profiling() const { return phase_ == Phase::profiling; }
  // Where a finished run stood in the directory until now, this one takes its place. Call it once nothing can refuse this run any
  // more: before its first iteration.
  void replace_finished_run() { files_.replace(in_force_.profile.get()); }
  // Starts again from the greeting, with the policy in force if there is one; no block is left.
  void begin_again();
  // The same for new pools: the one that stands goes back first.
  void begin_again_without_pool();

 private:
  enum class Phase { loading, greeting, unmapping, profiling, holding, releasing, claiming, over };

  bool load();
  void take_stock();
  void begin_greeting();
  bool greet();
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
  RunFiles files_;
  Phase phase_ = Phase::loading;
  bool answered_ = false;
  std::string policy_name_;                       // without a wish
  std::unique_ptr<CostMeasurement> measurement_;  // while it is under way
  std::optional<ReturnedPool> returned_;          // the pool that is made anew, until its memory is spare
};

}  // namespace poise
