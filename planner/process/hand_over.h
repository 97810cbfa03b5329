#pragma once
// The journal that one planner of a run leaves to the next (journal.h). This object holds a journal from
// when it is read until the run continues from it: a planner that is replaced before that passes it on
// unchanged. One thread.

#include <optional>
#include <utility>

#include "planner/memory/planning_problem.h"
#include "planner/process/journal.h"
#include "planner/process/run.h"

namespace poise {

class RunLoop;

class HandOver {
 public:
  explicit HandOver(const Run& run) : run_(run) {}

  // Reads the earlier planner's journal if it is valid; otherwise requests are computed again.
  void read();
  // What this planner continues from: read, or kept by itself. Nothing: every request starts again.
  const std::optional<Journal>& journal() const { return journal_; }
  void drop() { journal_.reset(); }
  // Whether this planner takes over now: once, of one that was started for that.
  bool takes_over() { return run_.options.takes_over && !std::exchange(has_taken_over_, true); }
  // Moves it to the loop that continues from it.
  std::optional<Journal> take() { return std::exchange(journal_, std::nullopt); }
  // The resources that a plan must keep because of the journal's blocks. REQUIRES: there is a journal.
  FixedResources fixed_resources(const PoolPartition& pool) const;
  void lose(Lost lost);

  // Keeps the state of a loop that ends while the process continues, without its blocks.
  void keep(const RunLoop& loop);
  // Writes the journal of `loop` or, if there is no loop yet, the journal that this planner read. If the
  // disk fails, it prints a message, and requests under way are computed again.
  void write(const RunLoop* loop) const;

 private:
  // The journal of this run now, without its requests.
  Journal head() const;

  const Run& run_;
  std::optional<Journal> journal_;
  bool has_taken_over_ = false;
};

}  // namespace poise
