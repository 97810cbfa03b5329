#pragma once
// How far a block pool's memory is there while the loader makes it.

#include <algorithm>
#include <cstdint>

namespace poise {

// A pool's memory is made from both ends of each region towards its middle. Where `standing` bytes at each end are
// there (control segment), [0, low) and [high, region_bytes) may be used; low == high if all may. Whole pages.
struct StandingEnds {
  std::uint64_t low, high;
};
inline StandingEnds standing_ends(std::uint64_t region_bytes, std::uint64_t standing) {
  constexpr std::uint64_t kPageBytes = 4096;
  const std::uint64_t middle = region_bytes / 2 / kPageBytes * kPageBytes;
  const std::uint64_t whole_pages = standing / kPageBytes * kPageBytes;
  return {.low = std::min(whole_pages, middle),
          .high = region_bytes - std::min(whole_pages, region_bytes - middle)};
}

}  // namespace poise
