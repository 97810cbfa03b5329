#pragma once
// That this process moves, for the supervisor's watchdog (launch/supervisor/lifecycle/watchdog.py). A work
// loop counts its steps in the control segment itself. A step that may take longer than some seconds
// (a product on host cores, ten million input lines, a large copy) notes from within that it moves;
// what hangs notes nothing. A call that a disk, near or far, holds up cannot: a DiskWait speaks for it.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <stop_token>
#include <thread>

#include "common/shared_layout.h"

namespace poise {

namespace detail {
inline std::atomic<bool> progress_noted{false};
inline std::atomic<std::int64_t> disk_awaited_since{0};  // steady_clock's count; 0: no disk is
}  // namespace detail

// Any thread, at any time; cheap, also if many threads call it for each small piece of work.
inline void note_progress() {
  if (!detail::progress_noted.load(std::memory_order_relaxed)) {
    detail::progress_noted.store(true, std::memory_order_relaxed);
  }
}
// Whether progress was noted since the last call. The publisher's question.
inline bool take_progress() {
  return detail::progress_noted.exchange(false, std::memory_order_relaxed);
}

// While this lives, its thread waits for a disk, which counts as movement from 0.4 s to ten minutes. One thread of a
// process; they nest.
class DiskWait {
 public:
  DiskWait()
      : before_(detail::disk_awaited_since.exchange(
            std::chrono::steady_clock::now().time_since_epoch().count(),
            std::memory_order_relaxed)) {}
  DiskWait(const DiskWait&) = delete;
  DiskWait& operator=(const DiskWait&) = delete;
  ~DiskWait() { detail::disk_awaited_since.store(before_, std::memory_order_relaxed); }

 private:
  const std::int64_t before_;
};

// Counts in `word` what is noted, some times a second, from a thread of its own: the work loop may be in
// the middle of a long step. `word` outlives this.
class ProgressPublisher {
 public:
  explicit ProgressPublisher(ProgressWord& word);
  ProgressPublisher(const ProgressPublisher&) = delete;
  ProgressPublisher& operator=(const ProgressPublisher&) = delete;

 private:
  std::mutex mutex_;
  std::condition_variable_any over_;
  std::jthread thread_;  // last: it uses the others
};

}  // namespace poise
