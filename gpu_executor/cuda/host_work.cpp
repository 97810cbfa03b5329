#include "gpu_executor/cuda/host_work.h"

#include <cuda.h>
#include <pthread.h>

#include <chrono>
#include <exception>
#include <new>
#include <utility>

#include "common/liveness/progress.h"
#include "common/testing/failpoint.h"
#include "common/trouble.h"
#include "kernels/cuda/check.h"

namespace poise {
namespace {

using cuda::cuda_check;

constexpr int kLooks = 2000;  // before it sleeps between two of them
constexpr auto kBetweenLooks = std::chrono::microseconds(10);

// Numbers go round: which of two is later is told by their difference.
bool is_at_least(std::uint32_t a, std::uint32_t b) { return static_cast<std::int32_t>(a - b) >= 0; }

// Calls of the driver that the runtime has not. They are asked of it, so that we need not be linked to it.
struct StreamWords {
  using Call = CUresult(CUstream, CUdeviceptr, cuuint32_t, unsigned int);
  Call* write;
  Call* wait;

  static const StreamWords& get() {
    static const StreamWords words{call("cuStreamWriteValue32"), call("cuStreamWaitValue32")};
    return words;
  }

 private:
  static Call* call(const char* name) {
    constexpr unsigned int kSince = 12000;  // CUDA 12.0
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    cuda_check(
        cudaGetDriverEntryPointByVersion(name, &found, kSince, cudaEnableDefault, &result), name);
    check(result == cudaDriverEntryPointSuccess && found != nullptr,
          "a driver for CUDA 13 has words in memory that streams wait for");
    return reinterpret_cast<Call*>(found);
  }
};

void check_driver(CUresult code, const char* what) {
  if (code != CUDA_SUCCESS) {
    fail(Exit::device_failed, "CUDA: {} failed with error {} of the driver", what,
         static_cast<int>(code));
  }
}

CUdeviceptr on_device(std::atomic<std::uint32_t>& word) {
  void* there = nullptr;
  cuda_check(cudaHostGetDevicePointer(&there, &word, 0), "a word in pinned memory");
  return reinterpret_cast<CUdeviceptr>(there);
}

}  // namespace

HostWork::HostWork() {
  static_cast<void>(StreamWords::get());
  void* memory = nullptr;
  cuda_check(cudaHostAlloc(&memory, sizeof(Words), cudaHostAllocMapped | cudaHostAllocPortable),
             "words in pinned memory");
  words_ = new (memory) Words;
  thread_ = std::thread([this] { run(); });
  pthread_setname_np(thread_.native_handle(), "host");
}

HostWork::~HostWork() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  thread_.join();
  static_cast<void>(cudaFreeHost(words_));
}

void HostWork::queue(cudaStream_t stream, std::function<void()> work) {
  const std::uint32_t number = ++queued_;
  {
    const std::lock_guard lock(mutex_);
    tasks_.push_back({number, std::move(work)});
  }
  changed_.notify_all();
  const StreamWords& words = StreamWords::get();
  check_driver(words.write(stream, on_device(words_->reached), number,
                           CU_STREAM_WRITE_VALUE_DEFAULT),
               "telling the host that a stream is there");
  check_driver(words.wait(stream, on_device(words_->done), number, CU_STREAM_WAIT_VALUE_GEQ),
               "letting a stream wait for the host");
}

std::optional<std::string> HostWork::failure() {
  const std::lock_guard lock(mutex_);
  if (trouble_.empty() || std::exchange(told_, true)) {
    return std::nullopt;
  }
  return trouble_;
}

void HostWork::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return ending_ || !tasks_.empty(); });
    if (tasks_.empty()) {
      return;
    }
    const Task task = std::move(tasks_.front());
    tasks_.pop_front();
    const bool failed = !trouble_.empty();
    lock.unlock();
    if (!wait_until_reached(task.number)) {
      return;
    }
    if (!failed) {
      work(task);
    }
    words_->done.store(task.number, std::memory_order_release);
    note_progress();
    lock.lock();
  }
}

bool HostWork::wait_until_reached(std::uint32_t number) const {
  for (int looks = 0; !is_at_least(words_->reached.load(std::memory_order_acquire), number);
       ++looks) {
    if (ending_.load(std::memory_order_relaxed)) {
      return false;
    }
    if (looks >= kLooks) {
      std::this_thread::sleep_for(kBetweenLooks);
    }
  }
  return true;
}

void HostWork::work(const Task& task) {
  try {
    if (fails_at("device.stream")) {
      fail("a failpoint says so");
    }
    task.work();
  } catch (const std::exception& problem) {
    const std::lock_guard lock(mutex_);
    trouble_ = problem.what();
  }
}

}  // namespace poise
