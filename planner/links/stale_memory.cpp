#include "planner/links/stale_memory.h"

#include <fmt/core.h>

#include "common/trouble.h"
#include "common/words.h"
#include "planner/links/announce.h"

namespace poise {

StaleMemory find_stale_memory(const ControlSegment& control, const ExecutorLink::Greeting& device,
                              bool takes_over) {
  const auto released =
      static_cast<std::int32_t>(control.released_layers.load(std::memory_order_acquire));
  return {.lost_layers = device.resident_layers != released ? released : 0,
          .pool = !takes_over && control.pool_epoch.load(std::memory_order_acquire) != 0};
}

void reclaim(LoaderLink& loader, const StaleMemory& left) {
  loader.release(true);
  if (left.lost_layers > 0) {
    announce(fmt::format("the weights of {} are read again: no device holds them any more",
                         counted(left.lost_layers, "layer")));
    loader.restore_weights();
  }
}

}  // namespace poise
