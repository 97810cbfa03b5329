#pragma once
// In which order profiling's works are done, and how often each (profiling.h says what they are). Where a
// device's clock depends on what it did before, the works of a busy device stand together behind all
// others, with works before them whose times are discarded. One thread.

#include <cstddef>
#include <deque>
#include <functional>

#include "planner/profile/profiling.h"

namespace poise {

// One in this many rounds of a work has full size.
inline constexpr int kFewestRounds = 3;

class ProfileSequence {
 public:
  struct Work {
    ProfileWork work;
    int round;
    bool warms_up = false;  // its times are discarded
  };

  // Begins anew with all works. `heats`: the device's clock falls as it works. `on_host`: host cores attend. `absorbs`: the
  // model's activations can be attended as they are.
  void begin(int rounds, bool heats, bool on_host = false, bool absorbs = false);
  // Every round of the works that are wanted.
  void add(const std::function<bool(ProfileWork)>& wanted);
  // The same work again and again.
  void repeat(Work work, std::size_t times) { works_.assign(times, work); }

  // True where what is left waits for `add_busy`.
  bool only_busy_left() const { return works_.empty() && !busy_.empty(); }
  // The works of a busy device come next, behind `warm_ups` iterations that lower its clock.
  void add_busy(std::size_t warm_ups);

  bool empty() const { return works_.empty(); }
  // REQUIRES: not empty().
  Work take();
  std::size_t left() const { return works_.size() + busy_.size(); }
  int rounds() const { return rounds_; }
  bool heats() const { return heats_; }

 private:
  int rounds_ = 1;
  bool heats_ = false, on_host_ = false, absorbs_ = false;
  std::deque<Work> works_, busy_;
};

}  // namespace poise
