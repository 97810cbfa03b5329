#include "planner/schedule/block_table.h"

#include <algorithm>
#include <utility>

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
  const std::size_t pool = pool_index(block.kind, block.place);
  if (const auto more = more_holders_[pool].find(block.number.n); more != more_holders_[pool].end()) {
    --shared_;
    if (--more->second == 0) {
      more_holders_[pool].erase(more);
    }
    return;
  }
  pools_[pool].give_back(block.number);
}

bool BlockPools::shares_any(std::span<const BlockRef> blocks) const {
  return shared_ > 0 && std::ranges::any_of(blocks, [&](const BlockRef& block) {
           return (block.place == Place::host || block.place == Place::gpu) &&
                  more_holders_[pool_index(block.kind, block.place)].contains(block.number.n);
         });
}

void BlockPools::share(const BlockRef& block) {
  ++more_holders_[pool_index(block.kind, block.place)][block.number.n];
  ++shared_;
}

bool BlockPools::take(const BlockRef& block) {
  return (block.place == Place::host || block.place == Place::gpu) &&
         pools_[pool_index(block.kind, block.place)].take(block.number);
}

void BlockPools::set_limits(std::uint32_t act_blocks, std::uint32_t kv_blocks, Place place) {
  const bool kept = pools_[pool_index(BlockKind::act, place)].set_limit(act_blocks) &&
                    pools_[pool_index(BlockKind::kv, place)].set_limit(kv_blocks);
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
  if (block.place == Place::dropped) {
    check(block.kind == BlockKind::kv && ++dropped_ == size(), "dropped blocks come first");
    return;
  }
  ++counts_[pool_index(block.kind, block.place)];
}

void ContextBlocks::drop(std::int32_t blocks, BlockPools& pools) {
  check(blocks <= dropped_ || (blocks * kBlockTokens <= stored_ && token_blocks() == 0),
        "blocks that are dropped hold rows that are stored");
  for (; dropped_ < blocks; ++dropped_) {
    BlockRef& block = blocks_[static_cast<std::size_t>(dropped_)];
    --counts_[pool_index(block.kind, block.place)];
    pools.give_back(block);
    block = {.kind = BlockKind::kv, .place = Place::dropped, .number = {}};
  }
}

void ContextBlocks::mark_stored(std::int32_t tokens) {
  check(tokens >= 0 && stored_ + tokens <= room() && tokens <= gap().value_or(tokens),
        "tokens are stored in blocks that are there and hold no others");
  stored_ += tokens;
  skip_kept();
}

// Lost blocks that are whole again are not lost any more, and kept rows behind them count.
void ContextBlocks::skip_kept() {
  const auto whole = std::ranges::find_if(lost_, [&](std::uint32_t block) {
    return stored_ < std::min(static_cast<std::int32_t>(block + 1) * kBlockTokens, kept_end_);
  });
  lost_.erase(lost_.begin(), whole);
  if (stored_ < kept_end_) {
    const std::int32_t next =
        lost_.empty() ? kept_end_ : static_cast<std::int32_t>(lost_.front()) * kBlockTokens;
    stored_ = std::max(stored_, std::min(next, kept_end_));
  }
}

std::optional<std::int32_t> ContextBlocks::gap() const {
  if (lost_.empty()) {
    return std::nullopt;
  }
  std::uint32_t last = lost_.front();
  for (const std::uint32_t block : lost_) {
    last += block == last + 1 ? 1 : 0;
  }
  const std::int32_t end = static_cast<std::int32_t>(last + 1) * kBlockTokens;
  return end < kept_end_ ? std::optional(end - stored_) : std::nullopt;
}

void ContextBlocks::lose_device() {
  std::vector<std::uint32_t> lost;
  const std::int32_t end = ever_stored();
  for (std::int32_t i = 0; i < blocks_for(end); ++i) {
    const bool on_device = blocks_[static_cast<std::size_t>(i)].place == Place::gpu;
    if (on_device || std::ranges::binary_search(lost_, static_cast<std::uint32_t>(i))) {
      lost.push_back(static_cast<std::uint32_t>(i));
    }
  }
  stored_ = 0;
  restore(end, std::move(lost));
}

void ContextBlocks::restore(std::int32_t tokens, std::vector<std::uint32_t> lost) {
  check(stored_ == 0 && tokens <= room() && std::ranges::is_sorted(lost) &&
            (lost.empty() || static_cast<std::int32_t>(lost.back()) < blocks_for(tokens)),
        "lost blocks are among those that held tokens");
  kept_end_ = tokens;
  lost_ = std::move(lost);
  skip_kept();
}

void ContextBlocks::give_back_empty(BlockPools& pools) {
  while (size() > blocks_for(ever_stored())) {
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
    if (block.place != Place::nowhere && block.place != Place::dropped) {
      pools.give_back(block);
    }
  }
  blocks_.clear();
  counts_ = {};
  dropped_ = 0;
  stored_ = kept_end_ = 0;
  lost_.clear();
}

}  // namespace poise
