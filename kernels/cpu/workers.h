#pragma once
// The threads that run a CPU device's operations: a fixed pool that includes the calling thread. One
// thread at a time may call `parallel_for`. A free worker takes the next item, one at a time, so on a
// busy machine the pool never waits for a thread that has no item. Between operations workers spin
// for some tens of microseconds, then sleep. Each worker has its own scratch memory, allocated once.
// What an item computes must not depend on its worker.

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

#include "common/units.h"

namespace poise::cpu {

class Workers {
 public:
  // Scratch of each worker, 64-byte aligned; what the largest operation asks for.
  static constexpr Bytes kScratch{4 << 20};

  // REQUIRES: threads ≥ 1, the caller among them.
  explicit Workers(int threads);
  ~Workers();
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  int threads() const { return static_cast<int>(threads_.size()) + 1; }
  std::byte* scratch(int worker) const { return scratch_[static_cast<std::size_t>(worker)].get(); }

  // Calls fn(item, worker) once for each item in [0, count), worker in [0, threads()), and returns
  // when all are done. REQUIRES: fn does not throw and does not call parallel_for.
  template <typename Fn>
  void parallel_for(std::int64_t count, Fn&& fn) {
    using Body = std::remove_reference_t<Fn>;
    run({.call = [](void* body, std::int64_t item,
                    int worker) { (*static_cast<Body*>(body))(item, worker); },
         .body = const_cast<std::remove_const_t<Body>*>(&fn),
         .count = count});
  }
  // The same on the calling thread alone, as worker 0: for work that is not worth handing out.
  template <typename Fn>
  void inline_for(std::int64_t count, Fn&& fn) {
    for (std::int64_t item = 0; item < count; ++item) {
      fn(item, 0);
    }
  }

 private:
  struct Job {
    void (*call)(void* body, std::int64_t item, int worker);
    void* body;
    std::int64_t count;
  };
  struct Free {
    void operator()(std::byte* memory) const;
  };

  void run(const Job& job);
  void work(int worker);
  bool take(std::int64_t* item);
  void finish_item();

  // Items not yet taken, and above them the job's number: one word, so that a worker that takes an
  // item keeps its job in place until the item is done.
  alignas(64) std::atomic<std::uint64_t> ticket_ = 0;
  alignas(64) std::atomic<std::int64_t> unfinished_ = 0;
  Job job_{};  // a worker may read it while it holds an item of it
  alignas(64) std::atomic<int> sleepers_ = 0;
  std::atomic<bool> caller_sleeps_ = false;
  std::atomic<bool> ending_ = false;
  std::mutex mutex_;
  std::condition_variable job_posted_, job_done_;
  std::vector<std::unique_ptr<std::byte, Free>> scratch_;
  std::vector<std::thread> threads_;
};

}  // namespace poise::cpu
