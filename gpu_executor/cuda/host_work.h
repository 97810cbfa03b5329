#pragma once
// Work of host cores as a part of a CUDA stream. The stream writes a number to a word in pinned memory and waits
// for that number in another; a thread of ours waits for the first, works, and writes the second:
//
//   stream        | … before | reached := n | waits until done >= n | behind …
//   our thread    waits until reached >= n |  work n  | done := n |
//
// The thread makes no CUDA call. It writes `done` whatever becomes of the work, so a stream never waits for
// work that failed; the first failure is kept, and nothing works behind it. The public members are for the host
// thread of the device only.

#include <cuda_runtime_api.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

namespace poise {

class HostWork {
 public:
  HostWork();
  // REQUIRES: no stream waits for it any more.
  ~HostWork();
  HostWork(const HostWork&) = delete;
  HostWork& operator=(const HostWork&) = delete;

  // Behind what the stream was given, and before what it will be given.
  void queue(cudaStream_t stream, std::function<void()> work);
  // The first thing that went wrong, as a sentence; once.
  std::optional<std::string> failure();

 private:
  // The stream writes one and reads the other, each in a cache line of its own.
  struct Words {
    alignas(64) std::atomic<std::uint32_t> reached = 0;
    alignas(64) std::atomic<std::uint32_t> done = 0;
  };
  struct Task {
    std::uint32_t number;
    std::function<void()> work;
  };

  void run();
  bool wait_until_reached(std::uint32_t number) const;  // false: the end comes first
  void work(const Task& task);

  Words* words_;
  std::uint32_t queued_ = 0;
  std::atomic<bool> ending_ = false;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;  // guarded by mutex_, as is …
  std::string trouble_;     // … the sentence of the first failure
  bool told_ = false;
  std::thread thread_;
};

}  // namespace poise
