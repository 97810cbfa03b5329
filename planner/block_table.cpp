#include "planner/block_table.h"

#include "common/trouble.h"

namespace poise {

HostPools::HostPools(std::uint32_t act_blocks, std::uint32_t kv_blocks)
    : pools_{BlockPool(kv_blocks), BlockPool(act_blocks)} {
  static_assert(static_cast<int>(BlockKind::kv) == 0 && static_cast<int>(BlockKind::act) == 1);
}

std::optional<BlockRef> HostPools::take(BlockKind wanted) {
  const BlockKind other = wanted == BlockKind::kv ? BlockKind::act : BlockKind::kv;
  for (const BlockKind kind : {wanted, other}) {
    if (const auto number = pools_[index(kind)].take()) {
      return BlockRef{.kind = kind, .place = Place::host, .number = *number};
    }
  }
  return std::nullopt;
}

void HostPools::give_back(const BlockRef& block) {
  check(block.place == Place::host, "only host blocks come from the host's pools");
  pools_[index(block.kind)].give_back(block.number);
}

std::int64_t HostPools::free() const {
  return std::int64_t{pools_[0].free()} + std::int64_t{pools_[1].free()};
}

std::int64_t HostPools::total() const {
  return std::int64_t{pools_[0].limit()} + std::int64_t{pools_[1].limit()};
}

void ContextBlocks::append(const BlockRef& block) {
  blocks_.push_back(block);
  ++counts_[static_cast<std::size_t>(block.kind)];
}

void ContextBlocks::mark_stored(std::int32_t tokens) {
  check(tokens >= 0 && stored_ + tokens <= room(), "tokens are stored in blocks that are there");
  stored_ += tokens;
}

void ContextBlocks::give_back_all(HostPools& host) {
  for (const BlockRef& block : blocks_) {
    host.give_back(block);
  }
  blocks_.clear();
  counts_ = {};
  stored_ = 0;
}

}  // namespace poise
