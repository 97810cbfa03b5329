#pragma once
// The iterations of a run: which chunks run next, their orders, and what their results mean for requests
// and answers. Between two iterations the plan may change or the executor may be replaced; the loop then
// continues with the stored blocks. Owns the state of requests under way. One thread.

#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "planner/process/journal.h"
#include "planner/process/plan_in_force.h"
#include "planner/process/run.h"
#include "planner/results/answer_book.h"
#include "planner/schedule/culprit_search.h"
#include "planner/schedule/orders.h"
#include "planner/schedule/schedule.h"
#include "planner/virtual_time/prediction.h"

namespace poise {

class RunLoop {
 public:
  // Continues from `journal`; requests that are inconsistent there are computed again. REQUIRES: the pool
  // is granted.
  RunLoop(Run& run, const PlanInForce& in_force, std::optional<Journal> journal);

  // Tells the loop that the executor is configured for the plan in force.
  void configured();
  // Tells the loop that the plan in force has changed. REQUIRES: no iteration is under way.
  void use_plan();
  // The loader's border has moved.
  void use_partition(const PoolPartition& pool);
  // The executor was replaced or lost the connection: plans the iteration under way again. Rows of blocks
  // on the device are stored again. If it died each time it ran a certain request, that request gets an
  // error line (culprit_search.h), after which the loop may be idle.
  void executor_was_lost();

  // With a front: takes the requests that have come, and drops those that were cancelled. Waits at most `wait`
  // if there is nothing to do. False if no iteration can be begun: there is no request, or the front must take
  // what was answered first. REQUIRES: no iteration is under way.
  bool receive_requests(Seconds wait);

  bool idle() const { return scheduler_->idle(); }
  // Plans the next iteration and sends it. False if there is none to plan: the last requests were refused by their grammars, or this
  // process was asked to stop.
  // REQUIRES: none is under way, and the executor is ready.
  bool begin_iteration();
  // False if no results have arrived.
  bool take_results();

  std::uint64_t next_iteration() const { return iteration_ + 1; }
  const BlockPools& blocks() const { return scheduler_->blocks(); }
  // Requests that have begun.
  std::int64_t begun() const { return std::ssize(scheduler_->snapshots()); }
  // What a plan must keep unchanged.
  FixedResources fixed_resources() const;
  // Requests without an answer.
  std::vector<const Request*> unanswered() const;
  // The journal's part on requests, answers and how far they are.
  void describe(Journal& journal) const;
  void report();

 private:
  void begin_anew();
  bool restore(const Journal& journal);
  std::vector<RequestPart> parts() const;
  // Of the iteration that has just ended, those that go on and whose text is sent as it comes.
  std::vector<const RunningRequest*> streaming() const;
  void note_iteration(Seconds now);
  void write(const AnswerBook::Progress& progress);
  // The chunks of the next iteration, and the masks of those that want one. False if no request is left.
  bool choose_chunks();
  // Asks for the masks; a line whose grammar is refused gets an error line. True if none was; false,
  // too, if this process was asked to stop meanwhile.
  bool take_masks();
  void give_up(RequestId culprit);
  // `why`: nothing where no executor survives it.
  void end_choices(RequestId line, const std::optional<RequestError>& why = {});
  void remove(const Request& request);

  Run& run_;
  const PlanInForce& in_force_;
  std::unique_ptr<Scheduler> scheduler_;
  std::unique_ptr<OrderTables> tables_;
  std::unique_ptr<AnswerBook> answers_;
  std::vector<ScheduledChunk> chunks_;  // of the iteration under way
  std::unordered_map<std::uint32_t, std::vector<std::uint32_t>> masks_;  // … by request
  CulpritSearch search_;
  std::uint64_t iteration_ = 0;
  Seconds iteration_began_{};
  std::optional<Prediction> prediction_;  // where costs are known
  Prediction::Figures predicted_before_;  // by a planner before this one
  Seconds since_;                         // of this attempt, without the time between planners
  struct Before {
    std::int64_t preemptions = 0, shared_tokens = 0;
  };
  Before before_;  // as counted by planners before this one
};

}  // namespace poise
