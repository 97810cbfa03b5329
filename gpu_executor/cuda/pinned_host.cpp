#include "gpu_executor/cuda/pinned_host.h"

#include <cuda_runtime_api.h>
#include <spdlog/spdlog.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <iterator>

#include "common/liveness/progress.h"
#include "common/trouble.h"
#include "common/words.h"

namespace poise {
namespace {

// Of 96 GiB on a machine of 16 cores, 4 threads pin 18 GiB a second, 8 threads 16, 16 threads 9: they
// meet at the same locks. One thread does 10.
constexpr std::size_t kHelpers = 4;

// Whether this GPU's driver pins memory that is mapped read-only, as weights are. Where it does not, the
// driver is asked to pin it as any other memory, which it may refuse.
bool pins_read_only() {
  static const bool pins = [] {
    int device = 0, can = 0;
    const bool asked =
        cudaGetDevice(&device) == cudaSuccess &&
        cudaDeviceGetAttribute(&can, cudaDevAttrHostRegisterReadOnlySupported, device) ==
            cudaSuccess;
    if (!asked || can == 0) {
      static_cast<void>(cudaGetLastError());
      spdlog::warn(
          "the GPU's driver does not pin read-only memory; weights are pinned as other memory");
    }
    return asked && can != 0;
  }();
  return pins;
}

// Pages that are in this process's tables already are pinned faster; no matter if the kernel (before
// Linux 5.14) cannot put them there.
cudaError_t pin_one(std::span<std::byte> memory, bool read_only) {
  static_cast<void>(
      madvise(memory.data(), memory.size(), read_only ? MADV_POPULATE_READ : MADV_POPULATE_WRITE));
  const cudaError_t code = cudaHostRegister(
      memory.data(), memory.size(),
      cudaHostRegisterPortable |
          (read_only && pins_read_only() ? cudaHostRegisterReadOnly : cudaHostRegisterDefault));
  if (code != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
  }
  return code;
}

}  // namespace

struct PinnedHost::Batch {
  bool read_only;
  Bytes bytes{};
  std::size_t left = 0;  // slices
  std::chrono::steady_clock::time_point began = std::chrono::steady_clock::now();
};

PinnedHost::~PinnedHost() {
  {
    const std::scoped_lock lock(mutex_);
    ends_ = true;
  }
  more_.notify_all();
}

void PinnedHost::pin(std::span<const std::span<std::byte>> parts, bool read_only) {
  const auto batch = std::make_shared<Batch>(Batch{.read_only = read_only});
  Slices all;
  for (const std::span<std::byte> part : parts) {
    Part& own = parts_[part.data()];
    check(own.slices.empty() && !part.empty(), "a part is pinned once");
    own.memory = part;
    for (std::size_t at = 0; at < part.size(); at += kSlice) {
      const auto memory = part.subspan(at, std::min(kSlice, part.size() - at));
      own.slices.push_back(std::make_shared<Slice>(Slice{.memory = memory, .batch = batch}));
    }
    all.insert(all.end(), own.slices.begin(), own.slices.end());
    batch->bytes += Bytes{static_cast<std::int64_t>(part.size())};
  }
  batch->left = all.size();
  bytes_ += batch->bytes;
  waiting_ += std::ssize(all);
  {
    const std::scoped_lock lock(mutex_);
    queue_.insert(queue_.begin(), all.begin(), all.end());
  }
  const std::size_t cores = std::max(1u, std::thread::hardware_concurrency());
  while (helpers_.size() < std::min({kHelpers, cores, all.size()})) {
    helpers_.emplace_back([this] { work(); });
  }
  more_.notify_all();
}

// A helper's life.
void PinnedHost::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    more_.wait(lock, [&] { return ends_ || !queue_.empty(); });
    if (ends_) {
      return;
    }
    const std::shared_ptr<Slice> slice = queue_.front();
    queue_.pop_front();
    slice->state = State::in_work;
    lock.unlock();
    const cudaError_t code = pin_one(slice->memory, slice->batch->read_only);
    note_progress();
    lock.lock();
    Batch& batch = *slice->batch;
    if (code == cudaSuccess) {
      slice->state = State::pinned;
      --waiting_;
    } else {  // `waiting_` stays above 0, so that `need` looks for the failure
      slice->state = State::not_pinned;
      failure_ = fmt::format(
          "{} bytes of host memory cannot be pinned for the GPU: {}; the limit on locked memory "
          "(`ulimit -l`) or the machine's memory may be too small{}",
          batch.bytes.n, cudaGetErrorString(code),
          batch.read_only && !pins_read_only() ? ", or this GPU cannot use read-only memory" : "");
    }
    if (--batch.left == 0 && failure_.empty()) {
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - batch.began;
      spdlog::info("pinned {} bytes{} in {:.2f} s", batch.bytes.n,
                   batch.read_only ? ", read-only," : "", took.count());
    }
    moved_.notify_all();
  }
}

void PinnedHost::wait_for(const std::byte* begin, Bytes size) {
  const std::byte* const end = begin + size.n;
  std::unique_lock lock(mutex_);
  for (auto part = part_before(begin); part != parts_.end() && part->first < end; ++part) {
    Slices needed;
    for (const std::shared_ptr<Slice>& slice : part->second.slices) {
      const std::span<std::byte> memory = slice->memory;
      if (memory.data() < end && begin < memory.data() + memory.size()) {
        needed.push_back(slice);
      }
    }
    for (auto slice = needed.rbegin(); slice != needed.rend(); ++slice) {
      if ((*slice)->state == State::waits) {
        std::erase(queue_, *slice);
        queue_.push_front(*slice);
      }
    }
    for (const std::shared_ptr<Slice>& slice : needed) {
      moved_.wait(lock, [&] { return slice->state == State::pinned || !failure_.empty(); });
    }
  }
  if (!failure_.empty()) {
    fail(Exit::interrupted, "{}", failure_);
  }
}

std::map<const std::byte*, PinnedHost::Part>::const_iterator PinnedHost::part_before(
    const std::byte* at) const {
  auto part = parts_.upper_bound(at);
  return part == parts_.begin() ? part : std::prev(part);
}

PinnedHost::Run PinnedHost::run(const void* begin, Bytes size) const {
  const auto* const at = static_cast<const std::byte*>(begin);
  const auto found = part_before(at);
  if (found == parts_.end() || at < found->first) {
    return {size, false};
  }
  const std::span<std::byte> memory = found->second.memory;
  const auto offset = static_cast<std::size_t>(at - memory.data());
  if (offset >= memory.size()) {
    return {size, false};
  }
  const std::size_t left = std::min(kSlice - offset % kSlice, memory.size() - offset);
  return {std::min(size, Bytes{static_cast<std::int64_t>(left)}), offset % kSlice == 0};
}

void PinnedHost::unpin(std::span<const std::span<std::byte>> parts) {
  Slices slices;
  for (const std::span<std::byte> part : parts) {
    const auto found = parts_.find(part.data());
    check(found != parts_.end(), "what is unpinned was pinned");
    slices.insert(slices.end(), found->second.slices.begin(), found->second.slices.end());
  }
  std::vector<std::span<std::byte>> pinned;
  {
    std::unique_lock lock(mutex_);
    for (const std::shared_ptr<Slice>& slice : slices) {  // all, before a helper takes the next one
      if (slice->state == State::waits) {
        std::erase(queue_, slice);
        slice->state = State::not_pinned;
        --waiting_;
      }
    }
    for (const std::shared_ptr<Slice>& slice : slices) {
      moved_.wait(lock, [&] { return slice->state != State::in_work; });
      if (slice->state == State::pinned) {
        pinned.push_back(slice->memory);
      }
    }
  }
  const auto began = std::chrono::steady_clock::now();
  std::atomic<std::size_t> next{0};
  const auto unpin_some = [&] {
    for (std::size_t i = next++; i < pinned.size(); i = next++) {
      if (cudaHostUnregister(pinned[i].data()) != cudaSuccess) {
        static_cast<void>(cudaGetLastError());
      }
      // Its pages stay where they are, but for this process's tables, which a process that ends would
      // clear with one thread.
      static_cast<void>(madvise(pinned[i].data(), pinned[i].size(), MADV_DONTNEED));
      note_progress();
    }
  };
  {
    std::vector<std::jthread> others;
    while (others.size() + 1 < std::min(kHelpers, pinned.size())) {
      others.emplace_back(unpin_some);
    }
    unpin_some();
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
  if (pinned.size() > 1) {
    spdlog::info("unpinned {} in {:.2f} s", counted(pinned.size(), "slice"), took.count());
  }
  for (const std::span<std::byte> part : parts) {
    parts_.erase(part.data());
    bytes_ -= Bytes{static_cast<std::int64_t>(part.size())};
  }
}

}  // namespace poise
