#include "loader/blocks_segment.h"

#include "common/trouble.h"
#include "common/words.h"
#include "loader/strides.h"

namespace poise {
namespace {

constexpr std::uint64_t kPage = 4096;
constexpr std::uint64_t kMaxPool = std::uint64_t{1} << 46;  // bytes; no machine has them

// The first touch of a page zeroes it. No other process has the segment yet, and the loader never reads it.
void touch(const Segment& segment, const std::atomic<bool>& stop) {
  for_each_stride(segment.size(), [&](std::uint64_t begin, std::uint64_t end) {
    for (std::uint64_t at = begin; at < end; at += kPage) {
      *static_cast<volatile std::byte*>(&segment.data()[at]) = std::byte{0};
    }
    segment.forget_pages(begin, {static_cast<std::int64_t>(end - begin)});
    return !stop;
  });
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

BlocksSegment::BlocksSegment(const std::string& name, Bytes size, const std::atomic<bool>& stop)
    : segment_(Segment::create(name, size, [&stop] { return stop.load(); })) {
  touch(segment_, stop);
}

BlocksSegment::~BlocksSegment() {
  if (!left_) {
    unlink_segment(segment_.name());
  }
}

}  // namespace poise
