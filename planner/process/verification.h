#pragma once
// What `--verify` promises: no answer is published before the weights in shared memory were found to be those that were
// loaded, after that answer was computed. The loader checks them, pass after pass. Weights that turn out damaged may have
// been so since the last sound pass began; answers since then are taken back. So are those that the next planner finds when this one
// ends in any other way before a check (results_start.h): it may have other weights. One thread.

#include <optional>

#include "planner/process/run.h"

namespace poise {

class Verification {
 public:
  explicit Verification(Run& run) : run_(run) {}

  // Between two iterations: takes the answer to a pass, and asks for the next. Fails (Exit::interrupted) if the weights are
  // damaged or cannot be checked. Nothing without `--verify`.
  void step();
  // Whether all answers so far may be published; asks for a last pass if they may not yet. Waits a moment. Fails as above.
  bool confirm();

 private:
  void take_answer(Seconds timeout);
  void ask(bool at_once);

  Run& run_;
  bool began_ = false;             // an iteration ran
  std::optional<Bytes> asked_at_;  // size of the results when the pass under way was asked for
  bool last_ = false;              // that pass comes behind all answers
  Bytes sound_{};                  // results up to there are from sound weights; noted in the run directory
};

}  // namespace poise
