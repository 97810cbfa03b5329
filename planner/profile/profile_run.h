#pragma once
// `poise-planner profile`: waits for the model, meets loader and executor, measures, keeps the profile
// and ends. One object, one thread.

#include <memory>
#include <optional>
#include <string>

#include "common/shared_memory.h"
#include "common/trouble.h"
#include "planner/links/greeting.h"
#include "planner/links/status.h"
#include "planner/profile/profiler.h"

namespace poise {

// Measures what everything costs; links and logs as a run's.
struct ProfileOptions {
  std::filesystem::path run_dir;
  std::string run_id;
  std::filesystem::path loader_socket;
  std::filesystem::path executor_socket;
  std::filesystem::path output;  // the profile
  std::optional<Bytes> gpu_memory;
  std::optional<Bytes> host_memory;
  KvFormat kv_format = KvFormat::plain;
  std::string log;
  int death_descriptor = -1;
};

class ProfileRun {
 public:
  explicit ProfileRun(ProfileOptions options);

  // False when all is measured and kept, or the run was told to stop.
  bool step();
  Exit outcome() const { return outcome_; }

 private:
  bool host_is_in_order();
  void leave(const std::string& reason);

  ProfileOptions options_;
  Control control_;
  std::unique_ptr<OrderLog> log_;
  Links links_;
  std::unique_ptr<Profiler> profiler_;
  std::optional<Profile> profile_;
  RunStatus status_;
  StatusFile status_file_;
  Exit outcome_ = Exit::interrupted;
};

// What will be measured: the executor by its Hello, and the machine's memory now.
ProfiledMachine profiled_machine(const ControlSegment& control,
                                 const ExecutorLink::Greeting& device,
                                 const std::optional<Bytes>& gpu_memory,
                                 const std::optional<Bytes>& host_memory, KvFormat kv_format);

// Keeps it under its fingerprint. An error is ignored: costs are then measured again.
void keep_profile(const std::filesystem::path& folder, const Profile& profile);
// Where the profile of that fingerprint is kept.
std::filesystem::path kept_profile(const std::filesystem::path& folder,
                                   std::string_view fingerprint);

}  // namespace poise
