#include "planner/schedule/block_table.h"

#include "common/trouble.h"

namespace poise {

BlockPools::BlockPools(std::uint32_t act_blocks, std::uint32_t kv_blocks,
                       std::uint32_t gpu_act_blocks, std::uint32_t gpu_kv_blocks)
    : pools_{BlockPool(kv_blocks), BlockPool(act_blocks), BlockPool(gpu_kv_blocks),
             BlockPool(gpu_act_blocks)} {
  static_assert(
      pool_index(BlockKind::kv, Place::host) == 0 && pool_index(BlockKind::act, Place::host) == 1 &&
      pool_index(BlockKind::kv, Place::gpu) == 2 && pool_index(BlockKind::act, Place::gpu) == 3);
}

std::optional<BlockRef> BlockPools::take(BlockKind wanted, Place place) {
  const BlockKind other = wanted == BlockKind::kv ? BlockKind::act : BlockKind::kv;
  const Place elsewhere = place == Place::host ? Place::gpu : Place::host;
  const std::array<std::pair<BlockKind, Place>, kPools> sources{
      {{wanted, place}, {wanted, elsewhere}, {other, Place::host}, {other, Place::gpu}}};
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

bool BlockPools::take(const BlockRef& block) {
  return block.place != Place::nowhere &&
         pools_[pool_index(block.kind, block.place)].take(block.number);
}

void BlockPools::set_limits(std::uint32_t act_blocks, std::uint32_t kv_blocks) {
  const bool kept = pools_[pool_index(BlockKind::act, Place::host)].set_limit(act_blocks) &&
                    pools_[pool_index(BlockKind::kv, Place::host)].set_limit(kv_blocks);
  check(kept, "a border moves only past free blocks");
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
  check(block.place != Place::nowhere || (block.kind == BlockKind::kv && token_blocks() == size()),
        "blocks that are kept nowhere come first");
  static_assert(pool_index(BlockKind::kv, Place::nowhere) == kPools);
  blocks_.push_back(block);
  ++counts_[pool_index(block.kind, block.place)];
}

void ContextBlocks::mark_stored(std::int32_t tokens) {
  check(tokens >= 0 && stored_ + tokens <= room(), "tokens are stored in blocks that are there");
  stored_ += tokens;
}

void ContextBlocks::give_back_empty(BlockPools& pools) {
  while (size() > blocks_for(stored_)) {
    const BlockRef block = blocks_.back();
    blocks_.pop_back();
    --counts_[pool_index(block.kind, block.place)];
    if (block.place != Place::nowhere) {
      pools.give_back(block);
    }
  }
}

void ContextBlocks::give_back_all(BlockPools& pools) {
  for (const BlockRef& block : blocks_) {
    if (block.place != Place::nowhere) {
      pools.give_back(block);
    }
  }
  blocks_.clear();
  counts_ = {};
  stored_ = 0;
}

}  // namespace poise
