#pragma once
// Pages of 2 MiB for files in /dev/shm. They cost a 512th of the page faults and of the entries of a page table, so memory is
// reserved, mapped, pinned and given back faster, and cores that read much of it wait less for addresses. The kernel
// is asked for them (MADV_COLLAPSE, Linux 6.1) whatever `shmem_enabled` says, but for `deny`. Where it gives none, everything
// works with small pages.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "common/units.h"

namespace poise {

constexpr Bytes kHugePage = kMiB * 2;

// Gives the whole huge pages within bytes [begin, end) of a file in /dev/shm memory, as huge pages, zeroed where there was a
// hole. What lies in them stays. Returns whether all of them were given. It cannot be interrupted, so ask for some tens of MiB
// at a time. A kernel that refuses, or is slow because it compacts its memory, is not asked again for ten seconds, by
// anyone in this process. On machines of several NUMA nodes a huge page lies where one of its small ones would. Any thread;
// several may work on parts of one file.
bool take_huge_pages(int descriptor, std::int64_t begin, std::int64_t end);

// Of the whole huge pages within [begin, end).
constexpr Bytes whole_huge_pages(std::int64_t begin, std::int64_t end) {
  return {
      std::max<std::int64_t>(end / kHugePage.n * kHugePage.n - round_up(begin, kHugePage.n), 0)};
}

// A range of addresses that begins where a huge page can be mapped. Nothing may be accessed in it until a file is mapped over
// it (MAP_FIXED). What is mapped then belongs to the caller; the rest is freed.
class AlignedRange {
 public:
  explicit AlignedRange(std::size_t bytes);  // if there is no such range, data() is null
  AlignedRange(const AlignedRange&) = delete;
  AlignedRange& operator=(const AlignedRange&) = delete;
  ~AlignedRange();

  void* data() const { return data_; }
  // A file is mapped over the first `bytes`.
  void leave();

 private:
  std::size_t bytes_, all_;
  std::byte* begin_ = nullptr;
  std::byte* data_ = nullptr;
  bool left_ = false;
};

}  // namespace poise
