#pragma once
// Runs profiling.h's iterations on the executor and fits their times. A small set comes first; it tells
// how large the others may be to take seconds and not minutes. Then all works run several times, and
// those with outliers once more. The profiler claims a small pool and configures the executor with
// traces; without traces, as in runs, for the last works, which tell how long the device is idle between
// iterations. A run that follows must claim and configure again. One thread, one `step` at a time.

#include <optional>
#include <vector>

#include "common/shared_layout.h"
#include "planner/links/executor_link.h"
#include "planner/links/loader_link.h"
#include "planner/profile/profile_sequence.h"
#include "planner/profile/profiling.h"

namespace poise {

// What is measured, and how much memory that may take.
struct ProfiledMachine {
  ModelShape shape{};
  DType dtype{};
  KvFormat kv_format = KvFormat::plain;
  std::string device;  // as the executor names it
  DeviceKind kind = DeviceKind::cuda;
  Bytes gpu_memory;              // at most
  Bytes gpu_overhead;            // of it, beside the buffers
  Bytes host_free;               // that a pool may be made of
  Bytes host_memory;             // of the machine
  bool attends_on_host = false;  // host cores beside the device
  bool absorbs = false;          // this model's activations may be attended as they are
};

class Profiler {
 public:
  // The links have greeted, and outlive this, as `control` does.
  Profiler(ProfiledMachine machine, const ControlSegment& control, LoaderLink& loader,
           ExecutorLink& executor);
  ~Profiler();
  Profiler(const Profiler&) = delete;
  Profiler& operator=(const Profiler&) = delete;

  // Waits at most `timeout` for an answer. True if a message was sent or received.
  bool step(Seconds timeout);
  bool done() const { return phase_ == Phase::over; }
  // The share of known works that have begun; it never falls.
  double share() const { return share_; }
  // REQUIRES: done().
  const Profile& profile() const { return profile_; }
  // As `step`, for the executor's answer alone. Fails if it is gone: measurements of one do not hold for another.
  bool step_executor(Seconds timeout);
  // Once more as in the last work, without traces. REQUIRES: no iteration is under way.
  void configure_untraced() {
    executor_.configure(sizes_.device, machine_.gpu_memory, layout_, false);
  }

 private:
  enum class Phase { claiming, configuring, measuring, over };

  void begin(ProfileScale scale, int rounds);
  void begin_busy();
  void go_on();
  void next_pass();
  void check_whole() const;
  void repeat(const ProfileTimes::Outliers& outliers);

  const ProfiledMachine machine_;
  const WeightLayout layout_;
  const ControlSegment& control_;
  LoaderLink& loader_;
  ExecutorLink& executor_;
  Phase phase_ = Phase::claiming;
  bool small_ = true;  // the first pass, which only finds the scale
  bool repeated_ = false;
  bool rested_ = false;  // the time between iterations is being measured, untraced, or is known
  ProfileSizes sizes_;
  ProfileSequence works_;
  std::uint64_t iteration_ = 0;
  double share_ = 0;
  ProfileSequence::Work work_{};  // the iteration under way
  messages::IterationT tables_;   // its tables
  std::vector<ProfileTimes::StageSpan> spans_;
  Seconds rest_{};  // of the device, before it
  std::optional<ProfileTimes> times_;
  Profile profile_;
};

}  // namespace poise
