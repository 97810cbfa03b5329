#pragma once
// The planner process's clock, for measuring itself. No decision depends on it.

#include <chrono>

#include "common/units.h"

namespace poise {

inline Seconds monotonic_now() {
  return {
      std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count()};
}

// Adds the time from its construction to its end to a sum.
class Stopwatch {
 public:
  explicit Stopwatch(Seconds& sum) : sum_(sum), begin_(monotonic_now()) {}
  ~Stopwatch() { sum_ += monotonic_now() - begin_; }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  Seconds& sum_;
  Seconds begin_;
};

}  // namespace poise
