#pragma once
// A pool that the loader has taken back, until its memory is there for the next one: the executor, configured without a pool, unmaps
// it, and a moment later the loader finds that nobody maps it and says how much is spare (ControlSegment::spare_pool_bytes).
// A plan made before that would count the memory as taken.

#include <optional>

#include "common/shared_layout.h"
#include "planner/links/executor_link.h"

namespace poise {

class ReturnedPool {
 public:
  // Both must outlive this.
  ReturnedPool(const ControlSegment& control, const ExecutorLink& executor)
      : control_(control), executor_(executor) {}

  // True once it is, or once the loader has said nothing for long: a loader that ends, say. Does not wait. REQUIRES: the executor was
  // told to unmap it.
  bool is_spare();

 private:
  const ControlSegment& control_;
  const ExecutorLink& executor_;
  std::optional<Seconds> unmapped_at_;
};

}  // namespace poise
