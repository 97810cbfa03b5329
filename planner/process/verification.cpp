#include "planner/process/verification.h"

#include "common/trouble.h"
#include "common/words.h"
#include "planner/results/results_directory.h"

namespace poise {
namespace {

constexpr Seconds kCheckWait{0.1};

}  // namespace

void Verification::step() {
  if (!run_.options.verify || !run_.results) {
    return;
  }
  if (!began_) {
    began_ = true;
    sound_ = run_.results->size();
  }
  take_answer({0});
  if (!asked_at_) {
    ask(false);
  }
}

bool Verification::confirm() {
  if (!run_.options.verify || !began_) {
    return true;
  }
  if (!last_) {
    last_ = true;
    run_.print("checking the weights in shared memory once more\n");
    ask(true);
  }
  take_answer(kCheckWait);
  return !asked_at_;
}

void Verification::ask(bool at_once) {
  asked_at_ = run_.results->size();
  run_.loader->check_weights(at_once);
}

void Verification::take_answer(Seconds timeout) {
  if (!asked_at_) {
    return;
  }
  run_.loader->step(timeout);
  const auto checked = run_.loader->take_checked();
  if (!checked) {
    return;
  }
  if (checked->sound) {
    if (*asked_at_ != sound_) {
      sound_ = *asked_at_;
      write_verified(run_.options.run_dir, sound_);
    }
    asked_at_.reset();
    return;
  }
  if (!checked->damaged) {
    fail(Exit::interrupted, "--verify: the weights cannot be checked: {}; put the model's files back as they were, or "
         "end a kept loader (poise stop), and go on with --resume; without --verify it goes on at once",
         checked->sentence);
  }
  const Bytes taken_back = run_.results->size() - sound_;
  run_.results->take_back(sound_);
  fail(Exit::interrupted,
       "{}; answers since the last check that found them sound are taken back ({}): go on with "
       "--resume, which loads the model again; if this happens again, the machine's memory errs",
       checked->sentence, size_text(taken_back));
}

}  // namespace poise
