#pragma once
// From a schedule to what is sent: the tables of an iteration (common/messages.fbs). A mini-batch's
// KV buffer and ACT buffer are numbered in slots of one block. Each block of a sequence's context,
// and each block its new rows go to, has one slot: in the KV buffer for a KV block, in the ACT
// buffer and the same slot of the regenerated buffer for an ACT block. Blocks that hold rows are
// loaded (only their filled part), and K and V are regenerated from ACT ones. The executor puts new rows
// into the slot of their position, and stores them to that slot's block. KV blocks of the device have slots
// behind all others, with no memory of the buffer's: attention reads them where they lie. Loaded blocks have the lowest
// slots, in the order of their numbers and not of their requests: so neighbours in the pool are
// neighbours in the buffer and need one copy, and the regenerated blocks are one range; those that rows attend as they
// are come behind it. Where some layers
// have a window, the blocks that it leaves unseen come behind the seen ones, in runs and a range of
// their own, so that these layers can leave them out (common/windows/unseen_blocks.h). A block of place
// Nowhere has a slot of the KV buffer too; the rows that compute it again form a sequence of their own,
// before the sequence of the request's new rows, and both read it through the same entries. What host cores
// attend has no slots: its entries name the blocks themselves. Dropped blocks have entries, so that a sequence's
// entries count from its first token, and nothing else. A full block that several sequences of a mini-batch share is
// loaded once, into one slot that all of them name; the part of a block that a sequence takes over is loaded into a slot
// of its own, for the sequence's next rows come behind it.

#include <array>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "common/messages_generated.h"
#include "common/windows/unseen_blocks.h"
#include "planner/policies/policy.h"
#include "planner/schedule/schedule.h"

namespace poise {

// What each chunk adds to a mini-batch.
std::vector<PackItem> pack_items(std::span<const ScheduledChunk> chunks);

// Builds an iteration's tables. The result depends on the arguments of `build` alone; the object only
// holds scratch memory, one entry for each block of the pool. One thread.
class OrderTables {
 public:
  // `absorption`: rows behind the prompt attend ACT blocks as they are (Where::Activation).
  explicit OrderTables(const Allocation& host, const LayerWindows& windows = {},
                       bool absorption = false);

  // `batches` are indices into `parts`, each in exactly one.
  messages::IterationT build(std::uint64_t iteration, std::uint64_t pool_epoch,
                             std::span<const ScheduledChunk> chunks,
                             std::span<const PackItem> items,
                             std::span<const MiniBatchItems> batches);

 private:
  friend class MiniBatchBuilder;

  // Sorts the blocks of one kind that a mini-batch loads, without comparing them: a bit for each.
  class LoadedBlocks {
   public:
    explicit LoadedBlocks(std::uint32_t blocks);
    void add(BlockId block, std::uint32_t entry, std::int32_t tokens);
    // Calls `take(block, entry, tokens)` for each, by rising number, and forgets them.
    template <typename Take>
    void take_all(const Take& take);
    // The entries that name a block of an entry before them, and forgets them; called after take_all: (entry, the first).
    template <typename Take>
    void take_repeated(const Take& take);

   private:
    struct Use {
      std::uint32_t entry;   // of the mini-batch's attention entries
      std::uint32_t tokens;  // that are loaded
    };
    std::vector<std::uint64_t> bits_;
    std::vector<std::uint32_t> words_;  // of bits_ that are not zero
    std::vector<Use> uses_;             // by block; of the first entry that names it
    std::vector<std::pair<std::uint32_t, std::uint32_t>> repeated_;  // entry, block
  };

  static std::array<LoadedBlocks, kPools> pools_of(const Allocation& host);

  // By pool_index: seen by all layers, and unseen by those with a window; and ACT blocks that are not regenerated.
  struct Loaded {
    std::array<LoadedBlocks, kPools> seen, unseen, absorbed;
  };
  Loaded loaded_;
  const std::int32_t window_;
  const bool absorption_;
};

}  // namespace poise
