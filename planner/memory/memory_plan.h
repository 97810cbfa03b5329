#pragma once
// Where everything of a run lies, decided in one place for runs and for `poise plan`: blocks on the
// host and on the device, the device's buffers, and whether the host keeps the weights of layers that
// stay on the device. Those are there twice; where requests find too few blocks, the host's copy goes
// to blocks. Pure functions.

#include <cstdint>
#include <optional>

#include "planner/memory/sizes.h"

namespace poise {

struct RunDevice {
  Bytes cap;
  Bytes overhead;  // of it, taken beside buffers, before host memory is pinned
  bool is_host = false;
  bool holds_blocks = true;  // false: host memory in two places would save nothing
};

struct MemoryPlan {
  Allocation host;
  DeviceLimits device;
  Bytes overhead;  // of the device, with the page tables of what is pinned
  std::int32_t released_layers = 0;
};

// `resident_layers`: on the device already, and not on the host any more. Fails, with numbers, where
// host or device are too small.
MemoryPlan plan_memory(const Policy& policy, const ModelShape& shape, DType dtype,
                       const Demand& demand, const BatchOptions& options, const BlockBudget& budget,
                       const RunDevice& device,
                       std::optional<std::int32_t> resident_layers = std::nullopt);

}  // namespace poise
