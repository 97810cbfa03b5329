#pragma once
// How large everything is made for a run, decided once from what its requests ask for: how many
// blocks of context could ever be in use, how much host memory they may have, and what the device's
// buffers hold. Nothing is made larger than the requests can use. Pure functions; sizes of the
// machine come in as arguments.

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "common/device_memory.h"
#include "common/units.h"
#include "planner/policies/policy.h"
#include "planner/requests/request_size.h"
#include "planner/schedule/schedule.h"

namespace poise {

struct Rehearsal;

// What a user may set; 0 and nothing mean: decide.
struct BatchOptions {
  std::int32_t max_num_seqs = 256;
  std::int32_t min_num_seqs =
      1;  // where the policy may choose fewer (planner/memory/concurrency.h)
  std::int32_t mini_batch_tokens = 8192;  // of context
  std::int32_t prefill_tokens = 8192;     // of prompts in an iteration
  bool by_profile = false;                // mini_batch_tokens, where one is there; until decided
};
// With mini-batches of the size near that one for which the profile's KV Gen takes least per block:
// a GPU's products take as long for one row more than fills it as for all that fill it once more.
BatchOptions with_mini_batch(BatchOptions options, const Profile* profile);

// What the requests ask for, at most, with so many of them under way.
struct Demand {
  std::int64_t requests = 0;
  std::int32_t sequences = 0;         // under way at a time
  std::int32_t longest_context = 0;   // tokens
  std::int32_t largest_request = 0;   // blocks
  RequestId largest;                  // the request that is it
  std::int64_t most_blocks = 0;       // of the largest `sequences` together
  std::int64_t most_prompt_rows = 0;  // of the longest `sequences` prompts together
};
Demand demand_of(std::span<const RequestSize> requests, std::int32_t max_num_seqs);
Demand demand_of(std::span<const Request* const> requests, std::int32_t max_num_seqs);

// Bytes for blocks of context, all layers together: the least of what the user allows beside the
// weights and of what the machine still has, less a reserve for everything small.
struct BlockBudget {
  Bytes weights;                     // in the host's memory already
  Bytes available;                   // on the machine, now
  std::optional<Bytes> host_memory;  // the user's cap, weights included
  Bytes device_in_host{};            // what a device without memory of its own will take
  std::optional<Bytes> pool = {};    // it is there already, and no other will be made
  Bytes layer_copy{};                // given up for blocks, for each layer that stays on the device
};
Bytes bytes_for_blocks(const BlockBudget& budget);

// What a device has for weights, buffers and blocks.
struct DeviceMemory {
  Bytes cap;
  Bytes overhead;                 // of the cap, taken beside buffers, before host memory is pinned
  bool pins_host_memory = false;  // which takes page tables
};
DeviceRoom device_room(const ModelShape& shape, DType dtype, const Demand& demand,
                       const BatchOptions& options, const DeviceMemory& memory);

// What a policy decides from, but for the device; `host`: bytes for blocks.
AllocationInputs allocation_inputs(const ModelShape& shape, DType dtype, const Demand& demand,
                                   const BatchOptions& options, Bytes host);
// What plays a placement of theirs (planner/virtual_time/rehearsal.h).
Rehearsal rehearsal_of(const Demand& demand, const Allocation& blocks, const DeviceLimits& device,
                       const BatchOptions& options);

// The policy's split of those bytes, and of the device's where it is given. Fails, with numbers,
// where the largest request does not fit.
Allocation allocate_host(const Policy& policy, const ModelShape& shape, DType dtype,
                         const Demand& demand, const BatchOptions& options,
                         const BlockBudget& budget,
                         const std::optional<DeviceMemory>& device = std::nullopt,
                         const FixedPlacement& fixed = {});
// Refuses a pool that stands and holds fewer blocks than the largest request takes.
[[noreturn]] void fail_for_pool(const Demand& demand, std::int64_t blocks);
// A layer's region of the blocks segment for that split.
std::uint64_t region_bytes(const BlockSizes& sizes, const Allocation& host);

// The device's buffers: as the options say where the cap allows, smaller ones where it does not
// (half of everything, and again), beside what the policy placed there, and then as many resident
// layers as there is room for. Fails with the table where even the smallest do not fit.
DeviceLimits choose_device_limits(const ModelShape& shape, DType dtype, const Demand& demand,
                                  const Allocation& host, const BatchOptions& options,
                                  Bytes overhead, Bytes cap);

// What the device holds beside buffers and resident layers: the blocks that stand there, or what the
// policy placed there, or else what the cap leaves goes to ACT blocks, then to KV blocks. Of what the
// requests can use, the host holds the rest.
struct Placement {
  Allocation host;
  DeviceLimits device;
};
Placement place_blocks(const ModelShape& shape, DType dtype, const Demand& demand,
                       const Allocation& host, const BatchOptions& options, Bytes overhead,
                       Bytes cap, const FixedPlacement& fixed = {});

// The limits of schedules and mini-batches that follow.
ScheduleLimits schedule_limits(const Demand& demand, const Allocation& host,
                               const DeviceLimits& device);
PackLimits pack_limits(const BatchOptions& options, const DeviceLimits& device);

}  // namespace poise
