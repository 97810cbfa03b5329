#pragma once
// The sizes of a run, decided once from what its requests need: how many blocks of context can ever be
// in use, how much host memory they may take, and the size of the device's buffers. No size is larger
// than the requests can use. Pure functions; the machine's sizes are arguments.

#include <algorithm>
#include <cstdint>
#include <memory>
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

// What a device has for weights, buffers and blocks.
struct DeviceMemory {
  Bytes cap;
  Bytes overhead;                 // of the cap, taken beside buffers, before host memory is pinned
  bool pins_host_memory = false;  // which takes page tables
  bool holds_blocks = true;       // false: weights and buffers alone
  bool attends_on_host = false;   // host cores may attend beside it
};

// What is worked on at a time, and how its context is kept, as the user says.
struct BatchOptions {
  std::int32_t max_num_seqs = 256;
  std::int32_t min_num_seqs =
      1;  // lower bound if the policy may choose (planner/memory/concurrency.h)
  std::int32_t mini_batch_tokens = 8192;  // of context
  std::int32_t prefill_tokens = 8192;     // of prompts in an iteration
  // … beside requests that generate (ScheduleLimits::prompt_rows); nothing: by costs (overlap.h).
  std::optional<std::int32_t> prompt_rows = std::nullopt;
  std::optional<std::int32_t> sides = std::nullopt;  // of the device's buffers for loads, likewise
  bool by_profile = false;  // mini_batch_tokens is not the user's: policy or profile may decide it
  KvFormat kv_format = KvFormat::plain;  // of KV blocks
  bool host_attention = true;            // false: host cores attend nothing (--host-attention off)
  bool absorption = false;  // rows of answers attend ACT blocks as they are (--absorption on)
  bool share_prefixes = false;           // of prompts that begin alike (--prefix-sharing)
};
// `mini_batch_tokens` changed to the nearby size with the least KV Gen time per block: on a GPU, a
// product's time rises in steps, each for one more round of tiles.
BatchOptions with_mini_batch(BatchOptions options, const Profile* profile);
// `mini_batch_tokens` changed to the largest context, of whole requests, that fits the device's buffers
// while all layers but `resident` ones are streamed (Policy::fills_the_device).
BatchOptions with_largest_mini_batch(BatchOptions options, const ModelShape& shape, DType dtype,
                                     std::span<const RequestSize> requests,
                                     const KeptContext& kept, const DeviceMemory& memory,
                                     std::int32_t resident);

// Where all layers have a window, what a policy's requests keep of their context; with a policy that runs first
// tokens again, everything.
KeptContext kept_context(const ModelShape& shape, const Policy& policy);

// What the requests need at most, with at most `max_num_seqs` of them under way.
struct Demand {
  std::int64_t requests = 0;
  std::int32_t sequences = 0;         // under way at a time
  std::int32_t longest_context = 0;   // tokens
  std::int32_t largest_request = 0;   // blocks that it has at a time
  RequestId largest;                  // the request with that many
  std::int64_t most_blocks = 0;       // of the largest `sequences` together
  std::int64_t most_prompt_rows = 0;  // of the longest `sequences` prompts together
  std::int64_t most_tokens = 0;       // of the longest `sequences` contexts together, dropped ones too
  std::int32_t most_edits = 0;        // of logits, of one request's sample
  KeptContext kept = {};
  // Where requests differ, and are few enough to be rehearsed one by one: all of them, in order.
  std::shared_ptr<const std::vector<RequestSize>> each = nullptr;
};
// `prefill_rows`: of prompts in an iteration, at most.
Demand demand_of(std::span<const RequestSize> requests, std::int32_t max_num_seqs,
                 const KeptContext& kept = {}, std::int32_t prefill_rows = INT32_MAX);
Demand demand_of(std::span<const Request* const> requests, std::int32_t max_num_seqs);

// Bytes for blocks of context, all layers together: the smaller of what the user allows beside the
// weights and what the machine still has, minus a reserve for everything small.
struct BlockBudget {
  Bytes weights;                     // in the host's memory already
  Bytes available;                   // on the machine, now
  std::optional<Bytes> host_memory;  // the user's cap, weights included
  Bytes device_in_host{};            // what a device that is host memory will take
  std::optional<Bytes> pool = {};    // an existing pool, which is kept
  Bytes layer_copy{};                // freed for blocks for each layer that stays on the device
};
Bytes bytes_for_blocks(const BlockBudget& budget);

// What such a device has left for a policy.
DeviceRoom device_room(const ModelShape& shape, DType dtype, const Demand& demand,
                       const BatchOptions& options, const DeviceMemory& memory);

// A policy's inputs except the device; `host`: bytes for blocks.
AllocationInputs allocation_inputs(const ModelShape& shape, DType dtype, const Demand& demand,
                                   const BatchOptions& options, Bytes host);
// The rehearsal of a placement (planner/virtual_time/rehearsal.h).
Rehearsal rehearsal_of(const ModelShape& shape, const Demand& demand, const Allocation& blocks,
                       const DeviceLimits& device, const BatchOptions& options);

// The policy's split of those bytes, and of the device's if it is given. Fails with numbers if the
// largest request does not fit.
Allocation allocate_host(const Policy& policy, const ModelShape& shape, DType dtype,
                         const Demand& demand, const BatchOptions& options,
                         const BlockBudget& budget,
                         const std::optional<DeviceMemory>& device = std::nullopt,
                         const FixedPlacement& fixed = {});
// Refuses an existing pool that holds fewer blocks than the largest request needs.
[[noreturn]] void fail_for_pool(const Demand& demand, std::int64_t blocks);
// A layer's region of the blocks segment for that split.
std::uint64_t region_bytes(const BlockSizes& sizes, const Allocation& host);

// The device's buffers beside the blocks that the policy placed there: as the options say if the cap
// allows it, otherwise halved until they fit; then as many resident layers as there is room for. Fails
// with the table if even the smallest buffers do not fit.
DeviceLimits choose_device_limits(const ModelShape& shape, DType dtype, const Demand& demand,
                                  const Allocation& host, const BatchOptions& options,
                                  Bytes overhead, Bytes cap);

// The blocks that the device holds beside buffers and resident layers: those that exist there already,
// or those that the policy placed there, or the user's share; otherwise the rest of the cap goes to ACT
// blocks, then to KV blocks unless the user excludes them. The host holds the rest of what the requests
// can use.
struct Placement {
  Allocation host;
  DeviceLimits device;
};
Placement place_blocks(const ModelShape& shape, DType dtype, const Demand& demand,
                       const Allocation& host, const BatchOptions& options, Bytes overhead,
                       Bytes cap, const FixedPlacement& fixed = {});

// The resulting limits of schedules and mini-batches.
ScheduleLimits schedule_limits(const BatchOptions& options, const Demand& demand,
                               const Allocation& host, const DeviceLimits& device);
PackLimits pack_limits(const BatchOptions& options, const DeviceLimits& device);

}  // namespace poise
