#include "planner/process/hand_over.h"

#include <fmt/core.h>

#include <algorithm>

#include "common/files/sha256.h"
#include "common/trouble.h"
#include "planner/links/announce.h"
#include "planner/process/run_loop.h"

namespace poise {

Journal HandOver::head() const {
  Journal journal;
  journal.run_id = run_.options.run_id;
  journal.build = build_id();
  journal.model = to_hex(std::to_array(run_.control->fingerprint));
  journal.input = run_.input.requests.digest;
  journal.pool_epoch = run_.control->pool_epoch.load(std::memory_order_acquire);
  journal.partition = run_.control->pool;
  return journal;
}

void HandOver::read() {
  if (!journal_exists(run_.options.run_dir)) {
    return;
  }
  try {
    Journal journal = take_journal(run_.options.run_dir);
    if (!run_.options.takes_over) {
      return;  // of a run that ended in between: its pool is gone
    }
    check_same_work(journal, head());
    journal_ = std::move(journal);
  } catch (const Failure& failure) {
    announce(fmt::format("{}; what was under way is computed again", failure.what()));
  }
}

FixedResources HandOver::fixed_resources(const PoolPartition& pool) const {
  FixedResources fixed{.pool = pool};
  bool on_device = false;
  for (const Scheduler::Snapshot& one : journal_->requests) {
    fixed.running += one.running ? 1 : 0;
    on_device = on_device || std::ranges::any_of(one.blocks, [](const BlockRef& block) {
                  return block.place == Place::gpu;
                });
  }
  if (on_device) {
    fixed.placement.gpu_act_blocks = journal_->gpu_act_blocks;
    fixed.placement.gpu_kv_blocks = journal_->gpu_kv_blocks;
  }
  return fixed;
}

void HandOver::lose(Lost lost) {
  if (journal_) {
    lose_blocks(*journal_, lost);
  }
}

void HandOver::keep(const RunLoop& loop) {
  journal_ = head();
  loop.describe(*journal_);
  lose_blocks(*journal_, Lost::everything);
}

void HandOver::write(const RunLoop* loop) const {
  if (loop == nullptr && !journal_) {
    return;
  }
  Journal journal = head();
  if (loop != nullptr) {
    loop->describe(journal);
  } else {  // unused, so still true; but of a pool that may have been given back since
    const Journal here = std::move(journal);
    journal = *journal_;
    if (journal.pool_epoch != here.pool_epoch) {
      lose_blocks(journal, Lost::everything);
    }
    journal.pool_epoch = here.pool_epoch;
    journal.partition = here.partition;
  }
  try {
    write_journal(run_.options.run_dir, journal);
  } catch (const Failure& failure) {
    announce(fmt::format("{}; what was under way is computed again", failure.what()));
  }
}

}  // namespace poise
