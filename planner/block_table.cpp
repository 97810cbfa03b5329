#include "planner/block_table.h"

#include "common/trouble.h"

namespace poise {

BlockPools::BlockPools(std::uint32_t act_blocks, std::uint32_t kv_blocks,
                       std::uint32_t gpu_act_blocks)
    : pools_{BlockPool(kv_blocks), BlockPool(act_blocks), BlockPool(gpu_act_blocks)} {
  static_assert(pool_index(BlockKind::kv, Place::host) == 0 &&
                pool_index(BlockKind::act, Place::host) == 1);
}

std::optional<BlockRef> BlockPools::take(BlockKind wanted, Place place) {
  using Source = std::pair<BlockKind, Place>;
  constexpr Source kv{BlockKind::kv, Place::host}, act{BlockKind::act, Place::host},
      here{BlockKind::act, Place::gpu};
  const std::array<Source, kPools> sources = wanted == BlockKind::kv ? std::array{kv, act, here}
                                             : place == Place::gpu   ? std::array{here, act, kv}
                                                                     : std::array{act, here, kv};
  for (const auto& [kind, at] : sources) {
    if (const auto number = pools_[pool_index(kind, at)].take()) {
      return BlockRef{.kind = kind, .place = at, .number = *number};
    }
  }
  return std::nullopt;
}

void BlockPools::give_back(const BlockRef& block) {
  pools_[pool_index(block.kind, block.place)].give_back(block.number);
}

std::int64_t BlockPools::free() const {
  std::int64_t sum = 0;
  for (const BlockPool& pool : pools_) {
    sum += pool.free();
  }
  return sum;
}

std::int64_t BlockPools::total() const {
  std::int64_t sum = 0;
  for (const BlockPool& pool : pools_) {
    sum += pool.limit();
  }
  return sum;
}

void ContextBlocks::append(const BlockRef& block) {
  blocks_.push_back(block);
  ++counts_[static_cast<std::size_t>(block.kind)];
  on_gpu_ += block.place == Place::gpu ? 1 : 0;
}

void ContextBlocks::mark_stored(std::int32_t tokens) {
  check(tokens >= 0 && stored_ + tokens <= room(), "tokens are stored in blocks that are there");
  stored_ += tokens;
}

void ContextBlocks::give_back_all(BlockPools& pools) {
  for (const BlockRef& block : blocks_) {
    pools.give_back(block);
  }
  blocks_.clear();
  counts_ = {};
  on_gpu_ = 0;
  stored_ = 0;
}

}  // namespace poise
