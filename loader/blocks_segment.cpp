#include "loader/blocks_segment.h"

#include <algorithm>
#include <future>
#include <thread>
#include <utility>
#include <vector>

#include "common/standing_ends.h"
#include "common/trouble.h"
#include "common/words.h"
#include "loader/weight_fill.h"

namespace poise {
namespace {

constexpr std::uint64_t kPage = 4096;
// Bytes at each end of a region. The first round is small, so that work begins soon.
constexpr std::uint64_t kFirstRound = std::uint64_t{16} << 20;
constexpr std::uint64_t kLargestRound = std::uint64_t{128} << 20;
constexpr std::uint64_t kMaxPool = std::uint64_t{1} << 46;  // bytes; no machine has them

struct Part {
  std::uint64_t offset;
  Bytes bytes;
};

// What is new where `to` bytes instead of `from` stand at each end of each region.
std::vector<Part> parts_of_round(std::uint64_t region_bytes, std::int32_t layers,
                                 std::uint64_t from, std::uint64_t to) {
  std::vector<Part> parts;
  for (std::int32_t layer = 0; layer < layers; ++layer) {
    const std::uint64_t begin = static_cast<std::uint64_t>(layer) * region_bytes;
    const StandingEnds before = standing_ends(region_bytes, from);
    const StandingEnds then = standing_ends(region_bytes, to);
    const auto add = [&](std::uint64_t first, std::uint64_t last) {
      if (first < last) {
        parts.push_back({begin + first, {static_cast<std::int64_t>(last - first)}});
      }
    };
    add(before.low, then.low);
    add(then.high, before.high);
  }
  return parts;
}

// The first touch of a page zeroes it. No other process uses these parts yet, and the loader never reads them.
void touch(const Segment& segment, const std::vector<Part>& parts, const std::atomic<bool>& stop) {
  std::atomic<std::size_t> next{0};
  const auto some = [&] {
    for (std::size_t i = next++; i < parts.size() && !stop; i = next++) {
      const Part& part = parts[i];
      for (std::uint64_t at = 0; at < static_cast<std::uint64_t>(part.bytes.n); at += kPage) {
        *static_cast<volatile std::byte*>(&segment.data()[part.offset + at]) = std::byte{0};
      }
      segment.forget_pages(part.offset, part.bytes);
    }
  };
  std::vector<std::jthread> others;
  while (others.size() + 1 < std::min(fill_threads(), parts.size())) {
    others.emplace_back(some);
  }
  some();
}

}  // namespace

std::optional<std::string> why_no_partition(const PoolPartition& partition, const BlockSizes& sizes,
                                            std::int32_t layers) {
  if (partition.region_bytes == 0 || partition.region_bytes % kPage != 0) {
    return fmt::format("a region of {} bytes is no multiple of {}", partition.region_bytes, kPage);
  }
  if (partition.region_bytes > kMaxPool / static_cast<std::uint64_t>(layers)) {
    return fmt::format("{} of {} bytes are more than any machine has", counted(layers, "region"),
                       partition.region_bytes);
  }
  if (!partition.fits(sizes)) {
    return fmt::format("{} of {} bytes and {} of {} bytes do not fit into a region of {} bytes",
                       counted(partition.act_blocks, "ACT block"), sizes.block(BlockKind::act).n,
                       counted(partition.kv_blocks, "KV block"), sizes.block(BlockKind::kv).n,
                       partition.region_bytes);
  }
  return std::nullopt;
}

// One thread reserves a round while the others touch what the round before reserved.
void BlocksSegment::grow(std::uint64_t region_bytes, std::int32_t layers, std::uint64_t standing,
                         const std::function<void(std::uint64_t)>& stands,
                         const std::atomic<bool>& stop) {
  std::future<void> touching;
  while (standing < region_bytes) {
    std::uint64_t next = standing + std::clamp(standing, kFirstRound, kLargestRound);
    next = next * 2 < region_bytes ? next : region_bytes;
    std::vector<Part> parts = parts_of_round(region_bytes, layers, standing, next);
    for (const Part& part : parts) {
      segment_.reserve_again(part.offset, part.bytes, [&stop] { return stop.load(); });
    }
    if (touching.valid()) {
      touching.get();
    }
    standing = next;
    const auto work = [this, parts = std::move(parts), next, &stands, &stop] {
      touch(segment_, parts, stop);
      if (!stop) {
        stands(next);
      }
    };
    touching = std::async(std::launch::async, work);
  }
  if (touching.valid()) {
    touching.get();
  }
}

BlocksSegment::~BlocksSegment() {
  if (!left_) {
    unlink_segment(segment_.name());
  }
}

}  // namespace poise
