#pragma once
// The memory of one block pool: a shared segment made for a planner, named by the pool's epoch. It
// is reserved in full and touched by all cores while it is made, so that neither a full machine nor
// a first write surprises anyone later. Making one takes seconds for many GiB: the loader does it in
// a thread of its own. Destroyed, the name goes; who has it mapped keeps the memory until it lets
// go.

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>

#include "common/blocks.h"
#include "common/shared_memory.h"

namespace poise {

// Why this partition cannot be; nothing where it is sound.
std::optional<std::string> why_no_partition(const PoolPartition& partition, const BlockSizes& sizes,
                                            std::int32_t layers);

class BlocksSegment {
 public:
  // Fails where the memory is not to be had. Once `stop` is true it ends early: fails, or leaves
  // pages untouched.
  BlocksSegment(const std::string& name, Bytes size, const std::atomic<bool>& stop);
  ~BlocksSegment();
  BlocksSegment(const BlocksSegment&) = delete;
  BlocksSegment& operator=(const BlocksSegment&) = delete;

  Bytes size() const { return segment_.size(); }

 private:
  Segment segment_;
};

}  // namespace poise
