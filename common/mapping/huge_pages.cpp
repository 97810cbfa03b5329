#include "common/mapping/huge_pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>

namespace poise {
namespace {

constexpr int kCollapse = 25;  // MADV_COLLAPSE, which Debian 12's C library does not know

using Clock = std::chrono::steady_clock;

// A slower kernel is compacting its memory. Reserving small pages takes 1 s for 2 to 10 GB.
constexpr double kSlowest = 1e8;                       // bytes a second
constexpr std::chrono::duration<double> kPauses{0.1};  // beside that: a busy machine's
constexpr auto kAskAgain = std::chrono::seconds(10);

std::atomic<Clock::time_point> ask_from{};

std::size_t page_size() {
  static const auto size = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return size;
}

// The kernel makes a huge page of small ones, so one must be there. Unlike a write, this fails where there is no memory. Where
// pages alternate between NUMA nodes, so do the small ones that are made first, and huge pages follow them.
bool make_first_pages(std::byte* data, std::int64_t first, std::int64_t bytes) {
  const auto pages = kHugePage.n / static_cast<std::int64_t>(page_size());
  for (std::int64_t at = 0; at < bytes; at += kHugePage.n) {
    const std::int64_t page = pages == 0 ? 0 : (first + at) / kHugePage.n % pages;
    if (madvise(data + at + page * static_cast<std::int64_t>(page_size()), 1, MADV_POPULATE_WRITE) !=
        0) {
      return false;
    }
  }
  return true;
}

// Of whole huge pages from `first` on.
bool take_some(int descriptor, std::int64_t first, std::int64_t bytes) {
  const auto size = static_cast<std::size_t>(bytes);
  const AlignedRange range(size);
  return range.data() != nullptr &&
         mmap(range.data(), size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, descriptor,
              first) != MAP_FAILED &&
         make_first_pages(static_cast<std::byte*>(range.data()), first, bytes) &&
         madvise(range.data(), size, kCollapse) == 0;
}

}  // namespace

bool take_huge_pages(int descriptor, std::int64_t begin, std::int64_t end) {
  const std::int64_t first = round_up(begin, kHugePage.n);
  const std::int64_t bytes = whole_huge_pages(begin, end).n;
  if (bytes == 0) {
    return true;
  }
  const auto began = Clock::now();
  if (began < ask_from.load()) {
    return false;
  }
  const bool given = take_some(descriptor, first, bytes);
  const auto now = Clock::now();
  const std::chrono::duration<double> expected(static_cast<double>(bytes) / kSlowest);
  if (!given || now - began > kPauses + expected) {
    ask_from = now + kAskAgain;
  }
  return given;
}

AlignedRange::AlignedRange(std::size_t bytes)
    : bytes_(ceil_div(static_cast<std::int64_t>(bytes), static_cast<std::int64_t>(page_size())) *
             page_size()),
      all_(bytes_ + static_cast<std::size_t>(kHugePage.n)) {
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
