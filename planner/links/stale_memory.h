#pragma once
// What ended processes left behind in the host's memory: weights that only a device held, and a pool
// whose planner was killed. The loader cleans it up before a planner sizes a pool.

#include <cstdint>

#include "common/shared_memory.h"
#include "planner/links/executor_link.h"
#include "planner/links/loader_link.h"

namespace poise {

struct StaleMemory {
  std::int32_t lost_layers =
      0;              // the host released their weights, and no device holds them any more
  bool pool = false;  // a pool without a planner

  bool anything() const { return lost_layers > 0 || pool; }
};
// `takes_over`: an existing pool is this planner's.
StaleMemory find_stale_memory(const ControlSegment& control, const ExecutorLink::Greeting& device,
                              bool takes_over);

// Asks the loader to free the pool and to read lost weights again. It is done once the link neither
// `gives_back` nor has `asked_for_weights`; then look again.
void reclaim(LoaderLink& loader, const StaleMemory& left);

}  // namespace poise
