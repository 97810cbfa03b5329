#pragma once
// Compares predicted with measured times: every iteration that is sent also runs in virtual time, and
// both times are summed, for decoding iterations and for the whole run. It costs microseconds for each
// mini-batch and layer. One thread.

#include <cstdint>

#include "common/messages_generated.h"
#include "planner/virtual_time/virtual_executor.h"

namespace poise {

class Prediction {
 public:
  struct Figures {
    std::uint64_t decoding = 0;                 // iterations in which no prompt ran
    Seconds decode_predicted, decode_measured;  // of these together
    Seconds predicted, measured;                // of all
  };

  // `before`: the sums of an earlier planner in the same attempt.
  Prediction(const Profile& profile, const WeightLayout& layout, const DeviceLimits& limits,
             const LayerWindows& windows, const Figures& before)
      : windows_(windows), executor_(profile, layout, limits, windows), figures_(before) {}
  // The executor has new buffers from now on; the time for that is in neither sum.
  void reconfigure(const Profile& profile, const WeightLayout& layout, const DeviceLimits& limits) {
    executor_ = VirtualExecutor(profile, layout, limits, windows_);
    since_ = {-1};
  }

  // An iteration is sent now; `last` as in ExecutorLink::begin. Returns the `idle` to pass to it.
  LinkIdle begin(const messages::IterationT& tables, bool last, Seconds now);
  // Its results are there.
  void done(Seconds now);

  const Figures& figures() const { return figures_; }

 private:
  LayerWindows windows_;
  VirtualExecutor executor_;
  Figures figures_;
  Seconds since_{-1};  // the results of the iteration before, or the first one's begin
  Seconds predicted_{};
  bool decoding_ = false;
};

}  // namespace poise
