// What a planner does about what others lost: an executor that is another one now, weights that were
// on its device alone, a pool that a planner before this one left in the host's memory.

#include <spdlog/spdlog.h>

#include <utility>

#include "planner/links/announce.h"
#include "planner/links/stale_memory.h"
#include "planner/process/planner.h"

namespace poise {

bool Planner::weights_are_lost() const {
  return find_stale_memory(*control_, *executor_->greeting(), true).lost_layers > 0;
}

// True once the host has all weights that the device lacks, and no pool of a planner that is gone but
// the one that this planner takes over.
bool Planner::host_is_in_order() {
  if (loader_->gives_back() || loader_->asked_for_weights()) {
    return false;
  }
  const StaleMemory left =
      find_stale_memory(*control_, *executor_->greeting(), options_.takes_over);
  if (!left.anything()) {
    return true;
  }
  if (left.lost_layers > 0 && journal_) {
    lose_blocks(*journal_, Lost::everything);
  }
  reclaim(*loader_, left);
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
    announce("the gpu_executor is back: the iteration under way is sent again");
    chunks_.clear();
    scheduler_->abandon(true);
  }
  configure();
}

// From the greeting on, with all that was answered so far; but no block is left, since the weights
// must have their memory back.
void Planner::begin_again() {
  if (scheduler_) {
    chunks_.clear();
    scheduler_->abandon(true);
    journal_ = journal_of_now();
    journal_->requests = scheduler_->snapshots();
    journal_->answers = answers_->snapshots();
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
