#pragma once
// `poise-planner profile`: the planner as far as the profiler, and no further. Waits for the model,
// greets loader and executor, measures, keeps the profile and ends. One object, one thread.

#include <memory>
#include <optional>
#include <string>

#include "common/shared_memory.h"
#include "common/trouble.h"
#include "planner/greeting.h"
#include "planner/options.h"
#include "planner/profiler.h"
#include "planner/status.h"

namespace poise {

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

// What is there to be measured: the executor as it greeted, the machine's memory as it is now.
ProfiledMachine profiled_machine(const ControlSegment& control,
                                 const ExecutorLink::Greeting& device,
                                 const std::optional<Bytes>& gpu_memory,
                                 const std::optional<Bytes>& host_memory);

// Keeps it under its fingerprint. That it cannot be kept is no trouble: it is measured again then.
void keep_profile(const std::filesystem::path& folder, const Profile& profile);
// Where the profile of that fingerprint is kept.
std::filesystem::path kept_profile(const std::filesystem::path& folder,
                                   std::string_view fingerprint);

}  // namespace poise
