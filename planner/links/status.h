#pragma once
// The progress of a run in RUN/status.json, for `poise status` and the progress line. The file is
// replaced as a whole (a reader never sees half of it), at most twice a second to keep it cheap. One
// thread. No result depends on the file: if the disk does not take it, the run continues, with a warning
// in the log.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/units.h"
#include "planner/links/executor_link.h"
#include "planner/links/histogram.h"
#include "planner/record/balance.h"
#include "planner/virtual_time/prediction.h"

namespace poise {

// The blocks of one kind in one place.
struct BlocksOf {
  std::string kind, place;
  std::int64_t total = 0, taken = 0;
};

// What became of a wish for another policy (planner/memory/policy_swap.h).
struct PolicyAnswer {
  std::uint64_t serial = 0;  // of the wish
  std::string policy;        // in force then: the wished one, unless it was refused
  std::uint64_t since = 1;
  std::string refusal;
  std::string held_back;  // what it cannot have until pools are made anew
};

struct RunStatus {
  std::string run_id;  // of the attempt that writes it
  // starting, loading, preparing, measuring, replaying, running, done, interrupted
  std::string state = "starting";
  double measured = 0;  // share of what is measured, or replayed
  std::uint64_t requests = 0, done = 0, errors = 0;
  std::int64_t prompt_tokens = 0, generated_tokens = 0;  // of this attempt
  std::int64_t shared_prompt_tokens = 0;  // not computed: other requests' blocks hold them
  std::int64_t running = 0, waiting = 0, preemptions = 0;
  std::uint64_t iteration = 0;
  std::int64_t suspects = 0;  // requests among which one that kills the executor is looked for
  std::int32_t planner_pid = 0, executor_pid = 0;
  std::string policy, device;
  std::uint64_t policy_since = 1;  // the first iteration it was used for
  std::uint64_t policy_serial =
      0;                         // of the last wish for another one (planner/memory/policy_swap.h)
  std::string policy_refusal;    // why that one is not in force; empty: it is
  std::string policy_held_back;  // what it cannot have until pools are made anew
  std::vector<PolicyAnswer> policy_answers;  // the last ones: several may ask at a time
  std::uint32_t act_blocks = 0, kv_blocks = 0;
  std::int64_t free_blocks = 0;
  std::vector<BlocksOf> pools;
  Histogram iteration_tokens = tokens_of_iterations();    // rows of each iteration
  Histogram token_seconds = seconds_between_tokens();     // of answers, with a front
  std::int32_t layers = 0, resident_layers = 0;
  Bytes host_weights;  // those that are in host memory now
  Bytes host_pool, device_memory;
  Seconds elapsed{};             // since the first iteration began
  Seconds planning_time{};       // schedules, mini-batches, tables
  Seconds message_time{};        // packing, sending, taking, logging
  Seconds answer_time{};         // text and result lines
  std::int64_t tokens_left = 0;  // at most, of all requests that are not done
  ExecutorTotals executor;
  std::optional<Prediction::Figures> prediction;  // where costs are known
  std::optional<Balance> balance;                 // once there is an executor
  BalanceFacts facts;

  // When a part of the run began, by the clock that all processes share (CLOCK_MONOTONIC).
  std::vector<std::pair<std::string, Seconds>> moments;

  // Records the fields above as the answer to the last wish.
  void answer_wish();
  // Notes that a part has begun, the first time.
  void reach(const std::string& moment);
};

// One JSON object.
std::string to_json(const RunStatus& status);

class StatusFile {
 public:
  explicit StatusFile(const std::filesystem::path& run_dir);
  // Writes unless it did so less than half a second ago; `always` writes in any case.
  void write(const RunStatus& status, Seconds now, bool always = false);
  bool due(Seconds now) const;

 private:
  std::filesystem::path path_;
  Seconds last_{-1};
  bool complained_ = false;  // since the file was last written
};

}  // namespace poise
