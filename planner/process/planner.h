#pragma once
// Process 2: decides. It reads requests, claims a block pool from the loader, configures the
// executor, plans iteration after iteration and writes answers as they are finished. One object, one
// thread, one `step` at a time; every decision is made by the parts it holds (sizes.h, schedule.h,
// policy.h, orders.h), none here.
//
//   phase        waits for
//   loading      the loader's weights to be sealed
//   greeting     loader and executor to say Hello, and the host to have all weights that no device has
//   profiling    the executor to be measured; only where costs are wanted that nobody has
//   claiming     the pool
//   configuring  the executor to be Ready
//   releasing    the loader to give weights' memory back that a device holds: before the pool, which
//                gets it; the executor is then configured a second time
//   running      the iteration under way, again and again; between two of them a policy may be
//                swapped, the executor be another, or the work be handed over to another planner
//   over         nothing: see outcome()

#include <memory>
#include <optional>
#include <vector>

#include "common/channel.h"
#include "common/shared_memory.h"
#include "common/trouble.h"
#include "planner/links/executor_link.h"
#include "planner/links/loader_link.h"
#include "planner/links/status.h"
#include "planner/memory/memory_plan.h"
#include "planner/memory/policy_swap.h"
#include "planner/process/journal.h"
#include "planner/process/run_options.h"
#include "planner/profile/profiler.h"
#include "planner/requests/run_input.h"
#include "planner/results/answer_book.h"
#include "planner/results/results_file.h"
#include "planner/schedule/orders.h"
#include "planner/schedule/schedule.h"
#include "planner/virtual_time/prediction.h"

namespace poise {

class Planner {
 public:
  // Fails where run directory, output, model or input are not what they must be. The loader's
  // control segment must be there.
  explicit Planner(RunOptions options);
  ~Planner();

  // Does what can be done now, or waits a moment for it. False when the run is over.
  bool step();
  // How it ended; REQUIRES: step() returned false.
  Exit outcome() const { return outcome_; }
  // "200 results …": what the last line of output says.
  std::string summary() const;

 private:
  enum class Phase {
    loading,
    greeting,
    profiling,
    claiming,
    configuring,
    releasing,
    running,
    over
  };

  bool load();
  void open_results_and_take_stock();
  void begin_greeting();
  bool greet();
  bool find_profile();
  bool measure();
  void use_profile(Profile profile);
  void decide_sizes();
  void choose_policy();
  void choose_as_wished();
  void refuse_wish(const Failure& refusal);
  bool make_room_as_wished(bool device_is_host);
  bool make_room(bool device_is_host);
  RunDevice run_device(bool device_is_host) const;
  Demand choose_demand(bool device_is_host) const;
  MoreRequests more_requests() const;
  void place_blocks(bool device_is_host, std::optional<Bytes> pool = {}, Bytes given_back = {});
  Bytes device_cap() const;
  std::int32_t released_layers() const;
  void claim_pool();
  void release_weights();
  bool configure();
  void begin_running();
  bool run();
  bool step_executor(Seconds wait);
  void plan_iteration();
  void take_results(const Received& results);
  void write_lines(const std::vector<ResultLine>& lines);

  // planner_swap.cpp
  std::unique_ptr<Policy> make_policy_as(const PolicyWish& wish) const;
  FixedResources fixed_resources() const;
  bool border_rests();
  bool settle();
  void obey_wish();
  void use_policy(std::unique_ptr<Policy> policy);
  void log_policy();
  void log_pool();
  bool move_border();
  Journal journal_of_now() const;
  void hand_over();
  void read_journal();
  bool take_over_pool(bool device_is_host);
  bool restore(const Journal& journal);
  void begin_scheduling();

  // planner_recovery.cpp
  bool weights_are_lost() const;
  bool host_is_in_order();
  void go_on_with_executor();
  void begin_again();

  bool give_up();
  void finish();
  void interrupt();
  void leave(const std::string& reason);
  void report(bool always = false);

  RunOptions options_;
  RunInput input_;
  Control control_;
  Phase phase_ = Phase::loading;
  Exit outcome_ = Exit::interrupted;

  std::optional<ResultsFile> results_;
  std::vector<RequestId> input_lines_;
  std::vector<const Request*> to_do_;
  std::unique_ptr<OrderLog> order_log_;
  std::unique_ptr<OrderLog> profile_log_;
  std::unique_ptr<LoaderLink> loader_;
  std::unique_ptr<ExecutorLink> executor_;

  std::string policy_name_;
  std::unique_ptr<Profiler> profiler_;      // while it measures
  std::shared_ptr<const Profile> profile_;  // nothing: costs are not known
  std::optional<Prediction> prediction_;
  std::unique_ptr<Policy> policy_;
  Demand demand_;
  Allocation host_;  // as the policy wishes it; the border may still be on its way there
  DeviceLimits device_limits_;
  Bytes device_overhead_{};
  std::int32_t layers_to_release_ =
      0;  // their weights, to the device alone, before a pool is claimed
  PackLimits pack_limits_;
  std::unique_ptr<Scheduler> scheduler_;
  std::unique_ptr<OrderTables> order_tables_;
  std::unique_ptr<AnswerBook> answers_;
  std::vector<ScheduledChunk> chunks_;  // of the iteration under way
  std::uint64_t iteration_ = 0;

  PolicyWishes wishes_;
  std::optional<PolicyWish> untried_wish_;  // chosen by a planner that takes over, not in force yet
  bool border_moves_ = false;  // it is not, or was not a moment ago, where the policy wishes it
  Seconds border_moved_{0};
  std::optional<Journal> journal_;  // of the planner before, until all goes on from it
  std::int64_t preemptions_before_ = 0;

  StatusFile status_file_;
  RunStatus status_;
  std::optional<Seconds> running_since_;
  std::optional<Seconds> stopping_since_;
};

}  // namespace poise
