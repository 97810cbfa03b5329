#pragma once
// The costs that a run measures before it is planned: a profiler's work, and the end of its pool, whose memory goes to the pool
// of the run.

#include "planner/links/returned_pool.h"
#include "planner/profile/profiler.h"

namespace poise {

class CostMeasurement {
 public:
  // As Profiler's, which may fail.
  CostMeasurement(ProfiledMachine machine, const ControlSegment& control, LoaderLink& loader,
                  ExecutorLink& executor);

  // Waits at most `timeout` for an answer. True if a message was sent or received.
  bool step(Seconds timeout);
  double share() const { return profiler_.share(); }
  // All is measured: take the profile, and have the pool given back.
  bool done() const { return phase_ == Phase::measuring && profiler_.done(); }
  // REQUIRES: done().
  const Profile& profile() const { return profiler_.profile(); }
  // In further steps: the loader takes the pool back, and the executor unmaps it. REQUIRES: done().
  void give_back();
  bool gave_back() const { return phase_ == Phase::gave_back; }

 private:
  enum class Phase { measuring, giving_back, unmapping, gave_back };

  LoaderLink& loader_;
  Profiler profiler_;
  ReturnedPool returned_;
  Phase phase_ = Phase::measuring;
};

}  // namespace poise
