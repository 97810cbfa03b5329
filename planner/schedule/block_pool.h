#pragma once
// Tracks which block numbers of one kind are free. take() returns the lowest one, so that blocks taken
// together are neighbours (one copy moves them) and the upper end stays free for a moving border. Pure
// bookkeeping without memory; one thread.

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
  // Takes this number; false, and nothing changes, if it is taken or does not exist.
  bool take(BlockId id);
  // REQUIRES: `id` was taken and has not been given back.
  void give_back(BlockId id);
  // From now on numbers 0 .. limit - 1 exist. False, and nothing changes, if a higher number is
  // taken.
  bool set_limit(std::uint32_t limit);
  // One beyond the highest number taken: the smallest possible limit.
  std::uint32_t least_limit() const;

  bool is_taken(BlockId id) const;

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
