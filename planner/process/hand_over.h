#pragma once
// What one planner of a run leaves to the next, and what this one was left (journal.h). Between reading a
// journal and going on from it this object holds it: a planner that is replaced before it came so far
// leaves it to its successor unharmed. One thread.

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

  // Takes what the planner before left, if all of it can be believed; the rest is computed again.
  void read();
  // What this planner goes on from: read, or kept by itself. Nothing: every request begins anew.
  const std::optional<Journal>& journal() const { return journal_; }
  void drop() { journal_.reset(); }
  // For the loop that goes on from it; this object holds it no more.
  std::optional<Journal> take() { return std::exchange(journal_, std::nullopt); }
  // What the journal's blocks leave a plan to decide. REQUIRES: there is a journal.
  FixedResources fixed_resources(const PoolPartition& pool) const;
  void lose(Lost lost);

  // Of a loop that ends while the process goes on, without its blocks.
  void keep(const RunLoop& loop);
  // Writes the journal of `loop` or, where there is none yet, what this planner was left. A disk that
  // does not take it costs less than the run: it is said, and requests under way are computed again.
  void write(const RunLoop* loop) const;

 private:
  // Of this run as it is now, without its requests.
  Journal head() const;

  const Run& run_;
  std::optional<Journal> journal_;
};

}  // namespace poise
