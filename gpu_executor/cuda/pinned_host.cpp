#include "gpu_executor/cuda/pinned_host.h"

#include <cuda_runtime_api.h>
#include <spdlog/spdlog.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <thread>

#include "common/trouble.h"

namespace poise {
namespace {

constexpr std::size_t kLeastSlice = std::size_t{256} << 20;
constexpr std::size_t kMostThreads = 16;

std::size_t threads_for(std::size_t slices) {
  const std::size_t cores = std::max(1u, std::thread::hardware_concurrency());
  return std::min({slices, cores, kMostThreads});
}

std::vector<std::span<std::byte>> cut(std::span<std::byte> memory,
                                      std::span<const std::uint64_t> cuts) {
  const std::size_t wanted = std::max(kLeastSlice, memory.size() / (2 * kMostThreads));
  std::vector<std::span<std::byte>> slices;
  std::size_t begin = 0;
  for (const std::uint64_t at : cuts) {
    if (at < memory.size() && at >= begin + wanted) {
      slices.push_back(memory.subspan(begin, at - begin));
      begin = at;
    }
  }
  slices.push_back(memory.subspan(begin));
  return slices;
}

// Calls `work` for each slice, a thread for a slice at a time.
void for_each(std::span<const std::span<std::byte>> slices,
              const std::function<void(std::span<std::byte>)>& work) {
  std::atomic<std::size_t> next{0};
  const auto take = [&] {
    for (std::size_t i = next++; i < slices.size(); i = next++) {
      work(slices[i]);
    }
  };
  std::vector<std::jthread> helpers;
  for (std::size_t i = 1; i < threads_for(slices.size()); ++i) {
    helpers.emplace_back(take);
  }
  take();
}

void unregister(std::span<const std::span<std::byte>> slices) {
  for (const std::span<std::byte> slice : slices) {
    if (cudaHostUnregister(slice.data()) != cudaSuccess) {
      static_cast<void>(cudaGetLastError());  // it was not: another slice failed first
    }
  }
}

}  // namespace

void PinnedHost::pin(std::span<const std::span<std::byte>> parts, bool read_only,
                     std::span<const std::uint64_t> cuts) {
  const auto began = std::chrono::steady_clock::now();
  Slices slices;
  std::map<const std::byte*, Slices> by_part;
  Bytes bytes{};
  for (const std::span<std::byte> part : parts) {
    Slices& own = by_part[part.data()] = cut(part, cuts);
    slices.insert(slices.end(), own.begin(), own.end());
    bytes += Bytes{static_cast<std::int64_t>(part.size())};
  }
  const unsigned flags =
      cudaHostRegisterPortable | (read_only ? cudaHostRegisterReadOnly : cudaHostRegisterDefault);
  std::atomic<cudaError_t> failed{cudaSuccess};
  for_each(slices, [&](std::span<std::byte> slice) {
    // Pages that are in this process's tables already are pinned faster; no matter if the kernel
    // (before Linux 5.14) cannot put them there.
    static_cast<void>(
        madvise(slice.data(), slice.size(), read_only ? MADV_POPULATE_READ : MADV_POPULATE_WRITE));
    const cudaError_t code = failed.load() == cudaSuccess
                                 ? cudaHostRegister(slice.data(), slice.size(), flags)
                                 : cudaSuccess;
    if (code != cudaSuccess) {
      static_cast<void>(cudaGetLastError());
      failed = code;
    }
  });
  if (failed != cudaSuccess) {
    unregister(slices);
    fail(Exit::interrupted,
         "{} bytes of host memory cannot be pinned for the GPU: {}; the limit on locked memory "
         "(`ulimit -l`) or the machine's memory may be too small",
         bytes.n, cudaGetErrorString(failed));
  }
  pinned_.merge(by_part);
  bytes_ += bytes;
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
  spdlog::info("pinned {} bytes{} in {} slices in {:.2f} s", bytes.n,
               read_only ? ", read-only," : "", slices.size(), took.count());
}

void PinnedHost::unpin(std::span<std::byte> memory) {
  const auto found = pinned_.find(memory.data());
  check(found != pinned_.end(), "what is unpinned was pinned");
  unregister(found->second);
  pinned_.erase(found);
  bytes_ -= Bytes{static_cast<std::int64_t>(memory.size())};
}

}  // namespace poise
