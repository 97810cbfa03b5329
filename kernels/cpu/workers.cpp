#include "kernels/cpu/workers.h"

#include <new>

#include "common/liveness/progress.h"
#include "common/trouble.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace poise::cpu {
namespace {

constexpr std::uint64_t kItems = (std::uint64_t{1} << 40) - 1;  // the ticket's lower bits
constexpr int kSpins = 2000;                                    // 50 µs on a Zen 5
constexpr std::align_val_t kAlignment{64};

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

}  // namespace

void Workers::Free::operator()(std::byte* memory) const { ::operator delete(memory, kAlignment); }

Workers::Workers(int threads) {
  check(threads >= 1, "a pool of workers has at least its caller");
  for (int worker = 0; worker < threads; ++worker) {
    scratch_.emplace_back(
        static_cast<std::byte*>(::operator new(static_cast<std::size_t>(kScratch.n), kAlignment)));
  }
  for (int worker = 1; worker < threads; ++worker) {
    threads_.emplace_back([this, worker] { work(worker); });
  }
}

Workers::~Workers() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  job_posted_.notify_all();
  for (std::thread& thread : threads_) {
    thread.join();
  }
}

bool Workers::take(std::int64_t* item) {
  std::uint64_t ticket = ticket_.load(std::memory_order_acquire);
  while ((ticket & kItems) != 0) {
    if (ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel)) {
      *item = job_.count - static_cast<std::int64_t>(ticket & kItems);
      return true;
    }
  }
  return false;
}

void Workers::finish_item() {
  note_progress();
  // The last one wakes the caller if it went to sleep; both sides order their two words alike.
  if (unfinished_.fetch_sub(1) == 1 && caller_sleeps_.load()) {
    const std::lock_guard lock(mutex_);
    job_done_.notify_one();
  }
}

void Workers::run(const Job& job) {
  if (job.count <= 0) {
    return;
  }
  if (job.count == 1 || threads_.empty()) {
    for (std::int64_t item = 0; item < job.count; ++item) {
      job.call(job.body, item, 0);
      note_progress();
    }
    return;
  }
  job_ = job;
  unfinished_.store(job.count, std::memory_order_relaxed);
  const std::uint64_t number = (ticket_.load(std::memory_order_relaxed) & ~kItems) + kItems + 1;
  ticket_.store(number | static_cast<std::uint64_t>(job.count));
  if (sleepers_.load() > 0) {
    const std::lock_guard lock(mutex_);
    job_posted_.notify_all();
  }
  std::int64_t item = 0;
  while (take(&item)) {
    job.call(job.body, item, 0);
    note_progress();
    unfinished_.fetch_sub(1, std::memory_order_acq_rel);
  }
  for (int spin = 0; spin < kSpins; ++spin) {
    if (unfinished_.load(std::memory_order_acquire) == 0) {
      return;
    }
    relax();
  }
  std::unique_lock lock(mutex_);
  caller_sleeps_ = true;
  job_done_.wait(lock, [this] { return unfinished_.load() == 0; });
  caller_sleeps_ = false;
}

void Workers::work(int worker) {
  while (true) {
    std::int64_t item = 0;
    while (take(&item)) {
      const Job job = job_;
      job.call(job.body, item, worker);
      finish_item();
    }
    bool idle = true;
    for (int spin = 0; spin < kSpins && idle; ++spin) {
      relax();
      idle = (ticket_.load(std::memory_order_relaxed) & kItems) == 0;
    }
    if (idle) {
      std::unique_lock lock(mutex_);
      sleepers_.fetch_add(1);
      job_posted_.wait(lock, [this] { return ending_ || (ticket_.load() & kItems) != 0; });
      sleepers_.fetch_sub(1);
      if (ending_) {
        return;
      }
    }
  }
}

}  // namespace poise::cpu
