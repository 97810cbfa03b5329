#pragma once
// Where each request's context lies: CAPTURE's unified block table (section IV, Figure 6). Per
// request a list of (kind, place, number) in position order, one entry for 16 tokens, taken when
// the tokens come and not before. Pure bookkeeping, one thread. The pools are those of the loader's
// partition. Numbers given back can be taken again at once, so give a request's blocks back only when no
// order that reads or writes them is under way. Requests whose prompts begin alike may hold the same full block
// (prefix_sharing.h): it is free once each of them has given it back.

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "common/blocks.h"
#include "common/units.h"
#include "planner/schedule/block_pool.h"

namespace poise {

// Where a block's bytes are between iterations. Nowhere: its tokens run again in each iteration; such a
// block has kind KV and no number, and comes before all other blocks of its request. Dropped: no row sees the
// block again, and its memory was given back; it has kind KV and no number, and only dropped blocks come before it.
enum class Place : std::uint8_t { host = 0, gpu = 1, nowhere = 2, dropped = 3 };

struct BlockRef {
  BlockKind kind;
  Place place;
  BlockId number;

  friend bool operator==(const BlockRef&, const BlockRef&) = default;
};

// Which of the pools a block is of: KV and ACT on the host, KV and ACT on the device.
inline constexpr std::size_t kPools = 4;
constexpr std::size_t pool_index(BlockKind kind, Place place) {
  return 2 * static_cast<std::size_t>(place) + static_cast<std::size_t>(kind);
}

// The free blocks of both kinds, wherever they lie, and how many requests hold each of the others.
class BlockPools {
 public:
  BlockPools(std::uint32_t act_blocks, std::uint32_t kv_blocks, std::uint32_t gpu_act_blocks = 0,
             std::uint32_t gpu_kv_blocks = 0);

  // A block of this kind and place; if there is none, of this kind elsewhere, then of the other kind (a
  // request's tokens do not depend on it, common/README section 8); nothing if all are taken.
  std::optional<BlockRef> take(BlockKind wanted, Place place = Place::host);
  // One holder less; without a holder the block is free.
  void give_back(const BlockRef& block);
  // Takes this block; false if it is taken or does not exist.
  bool take(const BlockRef& block);
  // One holder more. REQUIRES: the block is taken.
  void share(const BlockRef& block);
  // Holders beside the first, of all blocks together: blocks that requests have without taking one.
  std::int64_t shared() const { return shared_; }
  // Whether one of them has several holders.
  bool shares_any(std::span<const BlockRef> blocks) const;
  // Sets the sizes of this place's pools. REQUIRES: no block beyond them is taken.
  void set_limits(std::uint32_t act_blocks, std::uint32_t kv_blocks, Place place = Place::host);

  const BlockPool& pool(BlockKind kind, Place place = Place::host) const {
    return pools_[pool_index(kind, place)];
  }
  std::int64_t free() const;
  std::int64_t total() const;

 private:
  std::array<BlockPool, kPools> pools_;
  // By number, of blocks with several holders: those beside the first.
  std::array<std::unordered_map<std::uint32_t, std::int32_t>, kPools> more_holders_;
  std::int64_t shared_ = 0;
};

// One request's context. Owns its entries but not the pools: give_back_all() before it ends.
class ContextBlocks {
 public:
  const std::vector<BlockRef>& blocks() const { return blocks_; }
  // Blocks of the pools.
  std::int32_t count(BlockKind kind) const {
    return count(kind, Place::host) + count(kind, Place::gpu);
  }
  std::int32_t count(BlockKind kind, Place place) const { return counts_[pool_index(kind, place)]; }
  std::int32_t on_gpu() const {
    return count(BlockKind::kv, Place::gpu) + count(BlockKind::act, Place::gpu);
  }
  // Blocks of place Nowhere.
  std::int32_t token_blocks() const { return counts_[kPools]; }
  std::int32_t size() const { return static_cast<std::int32_t>(blocks_.size()); }
  // Of its first blocks, those that were dropped.
  std::int32_t dropped() const { return dropped_; }
  // Tokens from the first on whose rows are in the blocks, in every layer.
  std::int32_t stored() const { return stored_; }
  // After those: the number of lost tokens before the next one whose rows are kept; nothing if there is
  // no next one.
  std::optional<std::int32_t> gap() const;
  // Tokens that are stored, or were before blocks were lost.
  std::int32_t ever_stored() const { return std::max(stored_, kept_end_); }
  // The blocks that lost rows, by their place in blocks().
  const std::vector<std::uint32_t>& lost() const { return lost_; }
  // Tokens the blocks have room for.
  std::int32_t room() const { return size() * kBlockTokens; }

  // REQUIRES: blocks of place Nowhere come before all others.
  void append(const BlockRef& block);
  // Gives back its first blocks up to this number, which no row will read. REQUIRES: all of their tokens are
  // stored, and no block has place Nowhere.
  void drop(std::int32_t blocks, BlockPools& pools);
  // `tokens` rows after stored() are stored now; kept rows that follow them then count too.
  // REQUIRES: stored() + tokens <= room(), and no more than gap().
  void mark_stored(std::int32_t tokens);
  // The device's memory is lost: the rows of its blocks must be stored again, into the same blocks. Blocks
  // on the host keep their rows.
  void lose_device();
  // `tokens` were stored once, and then the rows in these blocks lost. REQUIRES: nothing is stored;
  // rising, and of blocks that hold some of the tokens.
  void restore(std::int32_t tokens, std::vector<std::uint32_t> lost);
  void give_back_all(BlockPools& pools);
  // Blocks in which nothing is stored.
  void give_back_empty(BlockPools& pools);

 private:
  void skip_kept();

  std::vector<BlockRef> blocks_;
  std::array<std::int32_t, kPools + 1> counts_{};  // by pool_index; without those that were dropped
  std::int32_t dropped_ = 0;
  std::int32_t stored_ = 0;
  std::int32_t kept_end_ = 0;        // tokens that were stored when blocks were lost
  std::vector<std::uint32_t> lost_;  // rising
};

constexpr std::int32_t blocks_for(std::int64_t tokens) {
  return static_cast<std::int32_t>(ceil_div(tokens, kBlockTokens));
}

}  // namespace poise
