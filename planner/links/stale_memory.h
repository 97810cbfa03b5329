#pragma once
// What processes that are gone left undone in the host's memory, and how the loader puts it right before
// anybody sizes a pool by it: weights that were on a device alone, and a pool whose planner was killed.

#include <cstdint>

#include "common/shared_memory.h"
#include "planner/links/executor_link.h"
#include "planner/links/loader_link.h"

namespace poise {

struct StaleMemory {
  std::int32_t lost_layers =
      0;              // the host released their weights, and no device holds them any more
  bool pool = false;  // nobody's

  bool anything() const { return lost_layers > 0 || pool; }
};
// `takes_over`: a pool that is there is this planner's.
StaleMemory find_stale_memory(const ControlSegment& control, const ExecutorLink::Greeting& device,
                              bool takes_over);

// Has the pool given back and lost weights read again. All is in order once the link neither
// `gives_back` nor has `asked_for_weights`; look again then. Fails where the loader is gone.
void reclaim(LoaderLink& loader, const StaleMemory& left);

}  // namespace poise
