// What a planner does about what others lost: an executor that is another one now, weights that were
// on its device alone, a pool that a planner before this one left in the host's memory.

#include <fmt/core.h>
#include <spdlog/spdlog.h>

#include <utility>

#include "common/trouble.h"
#include "planner/planner.h"
#include "planner/tell.h"

namespace poise {

// The host released them, and no device holds them any more.
bool Planner::weights_are_lost() const {
  const std::int32_t released = released_layers();
  return released > 0 && executor_->greeting()->resident_layers != released;
}

// True once the host has all weights that the device lacks, and no pool of a planner that is gone but
// the one that this planner takes over. Weights that were lost are read again, and the pool that has
// their place goes.
bool Planner::host_is_in_order() {
  if (loader_->gives_back() || loader_->asked_for_weights()) {
    return false;
  }
  const bool lost = weights_are_lost();
  const bool left_over =
      !options_.takes_over && control_->pool_epoch.load(std::memory_order_acquire) != 0;
  if (!lost && !left_over) {
    return true;
  }
  loader_->release(true);
  if (!loader_->gives_back()) {
    fail(Exit::interrupted, "the loader is gone");
  }
  if (lost) {
    tell(fmt::format("the weights of {} layers are read again: no device holds them any more",
                     released_layers()));
    if (journal_) {
      lose_blocks(*journal_, Lost::everything);
    }
    loader_->restore_weights();
  }
  return false;
}

// Another executor, or one that lost sight of us: it knows of nothing that was under way, and blocks
// on the device are lost. What they held is computed again, to the same bits.
void Planner::go_on_with_executor() {
  if (weights_are_lost()) {
    begin_again();
    return;
  }
  if (scheduler_) {
    tell("the gpu_executor is back: the iteration under way is sent again");
    parts_.clear();
    scheduler_->abandon(true);
  }
  configure();
}

// From the greeting on, with all that was answered so far; but no block is left, since the weights
// must have their memory back.
void Planner::begin_again() {
  if (scheduler_) {
    parts_.clear();
    scheduler_->abandon(true);
    journal_ = journal_of_now();
    journal_->requests = scheduler_->begun();
    journal_->answers = answers_->begun();
    lose_blocks(*journal_, Lost::everything);
    scheduler_.reset();
    answers_.reset();
    std::erase_if(to_do_, [&](const Request* request) { return results_->is_done(request->id); });
    status_.tokens_left = 0;
    for (const Request* request : to_do_) {
      status_.tokens_left += request->sampling.max_tokens;
    }
  }
  border_moves_ = false;
  status_.state = "preparing";
  phase_ = Phase::greeting;
  report(true);
}

}  // namespace poise
