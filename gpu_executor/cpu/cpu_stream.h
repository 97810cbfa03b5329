#pragma once
// A stream of the CPU device: one thread that does what it is given, in order, from a bounded queue. One that works at once has no
// thread: the host thread does each task when it is pushed, also while the stream is held; what it waits for must be reached.
// Events are real waits, so that ThreadSanitizer and wrong results show a missing dependency; the
// streams share nothing else. The host thread pushes; only it calls the public members.
//
// A stream of a set speed keeps it by sleeping, and machines wake a sleeper 20 to 100 µs late. So it has
// a clock of its own, which stands where its work should have ended. By this clock the next task begins,
// there and on paced streams that wait for it, and this clock is what its events report. The real time
// is a little later; the stream catches up at its next sleep. A stream without a set speed uses the real
// time. Work that takes longer than the set speed allows takes as long as the stream's thread had a core
// for it, so that whatever else the machine does is not counted. Where several threads share work, only
// the stream's own is counted: on a busy machine that is less than the work took.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>

#include "gpu_executor/device.h"

namespace poise {

// What is behind an Event of the CPU device. Each record is an object of its own: a waiter learns when
// it was reached and is ordered behind it alone, however often the event is recorded meanwhile.
class CpuEvent final : public Event {
 public:
  struct Record {
    std::mutex mutex;
    std::condition_variable changed;
    bool reached = false;                      // guarded by mutex, as are …
    StreamTotals totals;                       // … what the stream had done then …
    std::chrono::steady_clock::time_point at;  // … and when it was
  };

  explicit CpuEvent(bool tells) : timed(tells) {}

  const bool timed;              // false: a signal, which is asked nothing
  std::shared_ptr<Record> last;  // null: never recorded; host thread only
};

// The first thing that went wrong on any stream of a device.
class Trouble {
 public:
  void report(const std::string& sentence);
  // Relaxed: it must not order anything that events do not order.
  bool reported() const { return reported_.load(std::memory_order_relaxed); }
  std::optional<std::string> take_sentence();

 private:
  std::atomic<bool> reported_{false};
  std::mutex mutex_;
  std::string sentence_;  // guarded by mutex_
  bool told_ = false;     // guarded by mutex_
};

class CpuStream {
 public:
  using Clock = std::chrono::steady_clock;

  // `paced`: has a set speed. `jitter`: pauses of random length between tasks, to uncover orders that
  // hold by luck alone. `at_once`: has no thread.
  CpuStream(std::string name, Trouble& trouble, bool paced, std::optional<std::uint64_t> jitter,
            bool at_once = false);
  ~CpuStream();  // what is queued is done first
  CpuStream(const CpuStream&) = delete;
  CpuStream& operator=(const CpuStream&) = delete;

  // Adds work; if the queue is full, waits until some of it is done. It takes at least `least_ns` (of a paced stream).
  void push(std::function<void()> work, Bytes copied, std::int64_t least_ns);
  void record(CpuEvent& event);
  void wait(const CpuEvent& event);

  void hold();      // nothing more is begun, and the queue has no limit …
  void release();   // … until now
  void finish();    // waits until the queue is empty and the last task done; REQUIRES: not held
  void end_soon();  // its thread ends once its queue is empty

 private:
  struct Task {
    enum class Kind { work, record, wait } kind;
    std::function<void()> work;
    Bytes copied{};
    std::int64_t least_ns = 0;
    std::shared_ptr<CpuEvent::Record> record{};  // to reach or to wait for
    Clock::time_point pushed{};
  };

  // What the host thread waits for.
  enum class Awaited : std::uint8_t { nothing, room, end };

  void push(Task task);
  void await(Awaited what, std::unique_lock<std::mutex>& lock);
  bool is_so(Awaited what) const;
  void run();
  void run(Task& task);
  void do_work(Task& task);
  void wait_for(const Task& task);
  Clock::time_point begin_of(const Task& task) const;
  void pause();

  Trouble& trouble_;
  const bool paced_;
  // Only where the tasks are done: in this stream's thread, or, if it has none, in the host thread.
  Clock::time_point now_{};  // of a paced stream: when what was done has ended
  StreamTotals totals_;
  std::optional<std::mt19937_64> jitter_;

  std::mutex mutex_;
  std::condition_variable given_;  // wakes this stream's thread
  std::condition_variable done_;   // wakes the host thread once what it waits for is so: waking costs more than most tasks
  std::deque<Task> queue_;         // guarded by mutex_, as all below
  Awaited awaited_ = Awaited::nothing;
  bool working_ = false;
  bool held_ = false;
  bool ending_ = false;
  std::thread thread_;  // none where it works at once
};

}  // namespace poise
