#include "gpu_executor/cpu/cpu_stream.h"

#include <pthread.h>

#include <algorithm>
#include <utility>

#include "common/liveness/progress.h"
#include "common/liveness/thread_time.h"
#include "common/testing/failpoint.h"
#include "common/trouble.h"

namespace poise {
namespace {

constexpr std::size_t kQueueLimit = 4096;  // tasks; then the host waits …
constexpr std::size_t kRoom = 256;         // … until so many of them are begun
constexpr std::uint64_t kLongestPauseUs = 400;
constexpr auto kLongestSleep = std::chrono::milliseconds(500);

std::int64_t ns_between(CpuStream::Clock::time_point begin, CpuStream::Clock::time_point end) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(end - begin).count();
}

}  // namespace

void Trouble::report(const std::string& sentence) {
  const std::lock_guard lock(mutex_);
  if (!reported()) {
    sentence_ = sentence;
    reported_.store(true, std::memory_order_relaxed);
  }
}

std::optional<std::string> Trouble::take_sentence() {
  if (!reported()) {
    return std::nullopt;
  }
  const std::lock_guard lock(mutex_);
  return std::exchange(told_, true) ? std::nullopt : std::optional(sentence_);
}

CpuStream::CpuStream(std::string name, Trouble& trouble, bool paced,
                     std::optional<std::uint64_t> jitter, bool at_once)
    : trouble_(trouble), paced_(paced) {
  if (jitter) {
    jitter_.emplace(*jitter);
  }
  if (at_once) {
    return;
  }
  thread_ = std::thread([this] { run(); });
  pthread_setname_np(thread_.native_handle(), name.substr(0, 15).c_str());
}

CpuStream::~CpuStream() {
  end_soon();
  if (thread_.joinable()) {
    thread_.join();
  }
}

void CpuStream::push(std::function<void()> work, Bytes copied, std::int64_t least_ns) {
  push({.kind = Task::Kind::work, .work = std::move(work), .copied = copied, .least_ns = least_ns});
}

void CpuStream::record(CpuEvent& event) {
  event.last = std::make_shared<CpuEvent::Record>();
  push({.kind = Task::Kind::record, .record = event.last});
}

void CpuStream::wait(const CpuEvent& event) {
  if (event.last) {
    push({.kind = Task::Kind::wait, .record = event.last});
  }
}

void CpuStream::push(Task task) {
  if (!thread_.joinable()) {
    task.pushed = Clock::now();
    return run(task);
  }
  {
    std::unique_lock lock(mutex_);
    if (!held_ && queue_.size() >= kQueueLimit) {
      await(Awaited::room, lock);
    }
    task.pushed = Clock::now();
    queue_.push_back(std::move(task));
    if (held_) {
      return;
    }
  }
  given_.notify_one();
}

void CpuStream::await(Awaited what, std::unique_lock<std::mutex>& lock) {
  awaited_ = what;
  done_.wait(lock, [&] { return is_so(what); });
  awaited_ = Awaited::nothing;
}

bool CpuStream::is_so(Awaited what) const {
  switch (what) {
    case Awaited::nothing:
      return false;
    case Awaited::room:
      return queue_.size() <= kQueueLimit - kRoom;
    case Awaited::end:
      return queue_.empty() && !working_;
  }
  return false;
}

void CpuStream::hold() {
  const std::lock_guard lock(mutex_);
  held_ = true;
}

void CpuStream::release() {
  {
    const std::lock_guard lock(mutex_);
    if (!std::exchange(held_, false)) {
      return;
    }
    const auto now = Clock::now();
    for (Task& task : queue_) {
      task.pushed = now;
    }
  }
  given_.notify_one();
}

void CpuStream::finish() {
  std::unique_lock lock(mutex_);
  await(Awaited::end, lock);
}

void CpuStream::end_soon() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
    held_ = false;
  }
  given_.notify_one();
}

void CpuStream::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    given_.wait(lock, [this] { return !held_ && (ending_ || !queue_.empty()); });
    if (queue_.empty()) {
      return;
    }
    Task task = std::move(queue_.front());
    queue_.pop_front();
    working_ = true;
    const bool has_room = is_so(awaited_);
    lock.unlock();
    if (has_room) {
      done_.notify_one();
    }
    run(task);
    task = {};  // what it held is released before its end is announced
    lock.lock();
    working_ = false;
    if (is_so(awaited_)) {
      done_.notify_one();
    }
  }
}

void CpuStream::run(Task& task) {
  pause();
  switch (task.kind) {
    case Task::Kind::work:
      return do_work(task);
    case Task::Kind::record: {
      now_ = begin_of(task);
      {
        const std::lock_guard lock(task.record->mutex);
        task.record->reached = true;
        task.record->totals = totals_;
        task.record->at = now_;
      }
      task.record->changed.notify_all();
      return;
    }
    case Task::Kind::wait:
      return wait_for(task);
  }
}

CpuStream::Clock::time_point CpuStream::begin_of(const Task& task) const {
  return paced_ ? std::max(now_, task.pushed) : Clock::now();
}

void CpuStream::wait_for(const Task& task) {
  const auto begin = begin_of(task);
  std::unique_lock lock(task.record->mutex);
  task.record->changed.wait(lock, [&] { return task.record->reached; });
  now_ = paced_ ? std::max(begin, task.record->at) : Clock::now();
  totals_.wait_ns += ns_between(begin, now_);
}

void CpuStream::do_work(Task& task) {
  if (trouble_.reported()) {
    return;
  }
  const auto begin = begin_of(task);
  const auto worked_before = thread_time();
  try {
    if (fails_at("device.stream")) {
      fail("a failpoint says so");
    }
    task.work();
  } catch (const std::exception& problem) {
    trouble_.report(problem.what());
  }
  if (!paced_) {
    now_ = Clock::now();
  } else {
    now_ = begin + std::max<Clock::duration>(std::chrono::nanoseconds(task.least_ns),
                                             thread_time() - worked_before);
    while (Clock::now() < now_) {  // a slow device works as long as it sleeps
      note_progress();
      std::this_thread::sleep_until(std::min(now_, Clock::now() + kLongestSleep));
    }
  }
  note_progress();
  totals_.busy_ns += ns_between(begin, now_);
  totals_.bytes += task.copied.n;
}

void CpuStream::pause() {
  if (jitter_) {
    const std::uint64_t us = (*jitter_)() % (kLongestPauseUs + 1);
    if (us % 16 == 0) {  // most tasks follow at once, so that streams drift apart
      std::this_thread::sleep_for(std::chrono::microseconds(us));
    }
  }
}

}  // namespace poise
