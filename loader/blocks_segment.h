#pragma once
// The memory of one block pool: a shared segment made for a planner, named by the pool's epoch. The
// constructor reserves all of it and all cores touch it, so that later neither memory runs out nor a
// first write is slow. This takes seconds for many GiB: the loader does it in a thread of its own.
// The destructor removes the name; a process that has mapped the segment keeps its memory until it
// unmaps it.

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>

#include "common/blocks.h"
#include "common/shared_memory.h"

namespace poise {

// Why this partition is invalid; nothing if it is valid.
std::optional<std::string> why_no_partition(const PoolPartition& partition, const BlockSizes& sizes,
                                            std::int32_t layers);

class BlocksSegment {
 public:
  // Fails if there is not enough memory. Once `stop` is true it ends early: it fails, or leaves pages
  // untouched.
  BlocksSegment(const std::string& name, Bytes size, const std::atomic<bool>& stop);
  // Adopts the pool of a loader that has ended.
  explicit BlocksSegment(const std::string& name) : segment_(Segment::adopt(name)) {}
  ~BlocksSegment();
  BlocksSegment(const BlocksSegment&) = delete;
  BlocksSegment& operator=(const BlocksSegment&) = delete;

  Bytes size() const { return segment_.size(); }
  // The name stays, for a successor.
  void leave() { left_ = true; }

 private:
  Segment segment_;
  bool left_ = false;
};

}  // namespace poise
