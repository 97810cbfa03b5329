#pragma once
// The memory of one block pool: a shared segment made for a planner, named by the pool's epoch. It is hollow at
// first and `grow`s from both ends of each layer's region, where the blocks of either kind begin: work begins in what
// stands, while the rest is made behind it. All of it takes seconds for many GiB: the loader does it in a thread
// of its own. All cores touch what is reserved, so that later neither memory runs out nor a first write is slow.
// The destructor removes the name; a process that has mapped the segment keeps its memory until it
// unmaps it.

#include <atomic>
#include <cstdint>
#include <functional>
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
  // Hollow. Fails if there is not enough memory now.
  BlocksSegment(const std::string& name, Bytes size)
      : segment_(Segment::create_hollow(name, size)) {}
  // Adopts the pool of a loader that has ended.
  explicit BlocksSegment(const std::string& name) : segment_(Segment::adopt(name)) {}
  ~BlocksSegment();
  BlocksSegment(const BlocksSegment&) = delete;
  BlocksSegment& operator=(const BlocksSegment&) = delete;

  // No executor has it mapped, nor is one ending that had.
  bool is_unused() const { return segment_.is_ours_alone(); }
  // Makes it another pool, of which nobody knows yet: what it has too much is given back, what it lacks is hollow.
  // Blocks of the earlier pool lie in it, as those of earlier requests do in any. After a failure it is good
  // for nothing. REQUIRES: is_unused().
  void make_over(const std::string& name, Bytes size) { segment_.make_over(name, size); }
  // Makes the memory of all regions, `layers` of them, of which `standing` bytes at each end are there. `stands` is told how
  // many there are, in another thread, each time when there are more; at last region_bytes. Fails if there is not enough memory,
  // or (Exit::interrupted) once `stop` is true.
  void grow(std::uint64_t region_bytes, std::int32_t layers, std::uint64_t standing,
            const std::function<void(std::uint64_t)>& stands, const std::atomic<bool>& stop);

  Bytes size() const { return segment_.size(); }
  Bytes huge() const { return segment_.huge(); }  // of what this loader made, in huge pages
  // The name stays, for a successor.
  void leave() { left_ = true; }

 private:
  Segment segment_;
  bool left_ = false;
};

}  // namespace poise
