#include "common/mapping/huge_pages.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>

namespace poise {
namespace {

// Of linux/mman.h; Debian 12's C library knows neither.
constexpr int kPopulateWrite = 23;
constexpr int kCollapse = 25;

// A slower kernel is compacting its memory. Reserving small pages takes 1 s for 2 to 10 GB.
constexpr double kSlowest = 1e8;  // bytes a second

std::size_t whole_pages(std::size_t bytes) {
  constexpr std::size_t kPage = 4096;
  return (bytes + kPage - 1) / kPage * kPage;
}

// The kernel makes a huge page of small ones, so one must be there. Unlike a write, this fails where there is no memory.
bool make_first_pages(std::byte* data, std::int64_t bytes) {
  for (std::int64_t at = 0; at < bytes; at += kHugePage.n) {
    if (madvise(data + at, 1, kPopulateWrite) != 0) {
      return false;
    }
  }
  return true;
}

}  // namespace

bool take_huge_pages(int descriptor, std::int64_t begin, std::int64_t end) {
  const std::int64_t first = ceil_div(begin, kHugePage.n) * kHugePage.n;
  const std::int64_t bytes = end / kHugePage.n * kHugePage.n - first;
  if (bytes <= 0) {
    return true;
  }
  const auto size = static_cast<std::size_t>(bytes);
  const AlignedRange range(size);
  if (range.data() == nullptr || mmap(range.data(), size, PROT_READ | PROT_WRITE,
                                      MAP_SHARED | MAP_FIXED, descriptor, first) == MAP_FAILED) {
    return false;
  }
  const auto began = std::chrono::steady_clock::now();
  const bool all = make_first_pages(static_cast<std::byte*>(range.data()), bytes) &&
                   madvise(range.data(), size, kCollapse) == 0;
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
  return all && static_cast<double>(bytes) > took.count() * kSlowest;
}

AlignedRange::AlignedRange(std::size_t bytes)
    : bytes_(whole_pages(bytes)), all_(bytes_ + static_cast<std::size_t>(kHugePage.n)) {
  void* const range =
      mmap(nullptr, all_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) {
    return;
  }
  begin_ = static_cast<std::byte*>(range);
  const auto address = reinterpret_cast<std::uintptr_t>(begin_);
  data_ = begin_ + (static_cast<std::uintptr_t>(kHugePage.n) - address % kHugePage.n) % kHugePage.n;
}

AlignedRange::~AlignedRange() {
  if (begin_ == nullptr) {
    return;
  }
  if (!left_) {
    munmap(begin_, all_);
    return;
  }
  const auto unmap = [](std::byte* first, std::byte* last) {
    if (first < last) {
      munmap(first, static_cast<std::size_t>(last - first));
    }
  };
  unmap(begin_, data_);
  unmap(data_ + bytes_, begin_ + all_);
}

void AlignedRange::leave() { left_ = true; }

}  // namespace poise
