#pragma once
// `poise-planner replay`: gives the orders of a log to an executor once more, as they are, and compares
// what it answers with the record. No decision is made here. Weights come from a loader, as in a run; the
// pool is claimed with the recorded size. What the log does not finish is left out: the run computed it
// again, or was still at it.
//
//   record             is replayed as
//   PoolGrant          the same pool: claimed where it is another one, else its border is moved
//   Configure          itself, without traces
//   WeightsHeld        the same layers are removed from the host's memory
//   Iteration, orders  themselves, with the epoch of the pool that stands now
//
// One object, one thread; `run` takes as long as the replay does.

#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "common/shared_memory.h"
#include "common/trouble.h"
#include "planner/links/greeting.h"
#include "planner/links/status.h"
#include "planner/record/log_digest.h"
#include "planner/replay/replay_report.h"

namespace poise {

struct ReplayOptions {
  std::filesystem::path orders;  // the log; it is only read
  std::filesystem::path run_dir;
  std::string run_id;
  std::filesystem::path loader_socket;
  std::filesystem::path executor_socket;
  std::filesystem::path output;        // the report, as JSON
  std::filesystem::path replayed;      // a log of the replay; empty: none
  std::optional<std::uint64_t> until;  // the last iteration; nothing: all
  std::int32_t repeat = 1;
  std::optional<Bytes> host_memory;
  std::string log;
  int death_descriptor = -1;
};

class Replay {
 public:
  // Fails if the log cannot be read.
  explicit Replay(ReplayOptions options);

  // Replays and writes the report. Fails with Exit::interrupted if it was told to stop, and with a
  // sentence for the user if the orders cannot be replayed here.
  void run();

 private:
  void await_model();
  void greet();
  void replay_once();
  void replay(const messages::PoolGrantT& pool, const std::string& run_id);
  void replay(messages::ConfigureT configure);
  void replay(const messages::WeightsHeldT& held);
  void replay(const LoggedIteration& iteration);
  void restore_weights();
  void release_pool();
  void leave_loader();

  template <typename Condition>
  void await(Condition condition);
  bool tick();

  const ReplayOptions options_;
  LogDigest digest_;
  Control control_;
  std::unique_ptr<OrderLog> replayed_;
  Links links_;
  std::string pool_;            // that stands: the recorded run, epoch and size
  std::uint64_t recorded_pool_ = 0;  // its epoch in the log
  bool pool_is_noted_ = false;  // the last record was a PoolGrant
  bool device_holds_ = false;   // the layers that it is to hold, and no pool was claimed yet
  std::int32_t resident_ = -1;  // layers on the device
  ReplayReport report_;
  RunStatus status_;
  StatusFile status_file_;
};

}  // namespace poise
