#pragma once
// Process 2: decides. It reads requests, claims a block pool from the loader, configures the executor,
// plans iteration after iteration and writes answers as they are finished. One object, one thread, one
// `step` at a time. Its parts decide: Preparation (up to the first iteration), RunLoop (the iterations),
// PolicyChange (another policy between two iterations), HandOver (from planner to planner). This object
// only chooses which part acts next, and how the run ends.
//
//   phase        waits for
//   preparing    a plan and a pool (preparation.h)
//   configuring  the executor to be Ready
//   running      one iteration after the other; between two of them the policy may change, the executor
//                may be replaced, or the work handed over to another planner
//   confirming   the weights to be found sound behind the last answer (verification.h)
//   over         nothing: see outcome()

#include <memory>
#include <optional>
#include <string>

#include "common/trouble.h"
#include "planner/process/hand_over.h"
#include "planner/process/plan_in_force.h"
#include "planner/process/policy_change.h"
#include "planner/process/preparation.h"
#include "planner/process/run.h"
#include "planner/process/run_loop.h"
#include "planner/process/verification.h"

namespace poise {

class Planner {
 public:
  // Fails if run directory, output, model or input are wrong. The loader's control segment must
  // exist.
  explicit Planner(RunOptions options);

  // Does what can be done now, or waits a moment for it. False when the run is over.
  bool step();
  // How it ended; REQUIRES: step() returned false.
  Exit outcome() const { return outcome_; }
  // "200 results …": the last line of output.
  std::string summary() const;

 private:
  enum class Phase { preparing, configuring, running, confirming, over };

  bool prepare();
  bool configure();
  bool await_executor();
  void begin_running();
  bool run();
  bool between_iterations();
  void recover_executor();
  void prepare_again();
  void hand_over();

  bool give_up();
  void interrupt();
  void finish();
  void end(Exit outcome, const char* state);
  void leave(const std::string& reason);
  void report(bool always = false);

  Run run_;
  PlanInForce in_force_;
  HandOver hand_over_;
  PolicyChange change_;
  Preparation preparation_;
  Verification verification_;
  std::optional<RunLoop> loop_;  // once it has begun
  Phase phase_ = Phase::preparing;
  Exit outcome_ = Exit::interrupted;
  std::optional<Seconds> stopping_since_;
};

}  // namespace poise
