#pragma once
// Which block numbers of one kind are free. The lowest free number is handed out first, so that
// blocks taken together lie together (one copy moves them) and the upper end stays free for a
// border that moves. Pure bookkeeping: no memory behind it, one thread.

#include <cstdint>
#include <optional>
#include <vector>

#include "common/units.h"

namespace poise {

class BlockPool {
 public:
  // Numbers 0 .. limit - 1, all free.
  explicit BlockPool(std::uint32_t limit);

  // The lowest free number, or nothing when all are taken.
  std::optional<BlockId> take();
  // This number; false, and nothing changes, where it is taken or is none.
  bool take(BlockId id);
  // REQUIRES: `id` was taken and has not been given back.
  void give_back(BlockId id);
  // From now on numbers 0 .. limit - 1 exist. False, and nothing changes, where one beyond it is
  // taken.
  bool set_limit(std::uint32_t limit);
  // One beyond the highest number taken: the smallest limit there can be now.
  std::uint32_t least_limit() const;

  std::uint32_t limit() const { return limit_; }
  std::uint32_t free() const { return free_; }
  std::uint32_t taken() const { return limit_ - free_; }

 private:
  // Bit i of word w stands for number 64·w + i; set: free. Bits from limit_ on are clear.
  std::vector<std::uint64_t> free_bits_;
  std::uint32_t limit_ = 0;
  std::uint32_t free_ = 0;
  std::size_t lowest_word_ = 0;  // no word before it has a free bit
};

}  // namespace poise
