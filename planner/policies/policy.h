#pragma once
// A policy answers the planner's three questions (common/README section 5): how the host's pool is split
// between ACT and KV blocks, of which kind a request's next block is, and which sequences form a
// mini-batch. Answers are functions of the arguments alone, without clock, socket, file or log, so that
// the same code plans a run, a dry run and a simulation. An object holds only the options it was made
// with; threads may share it. A policy's answers change the time of a run and never its tokens
// (common/README section 8).

#include <algorithm>
#include <compare>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/blocks.h"
#include "common/units.h"
#include "planner/costs/cost_model.h"

namespace poise {

// The device memory that a policy may use.
struct DeviceRoom {
  Bytes layer;      // for the weights of one layer that stays on the device
  Bytes streaming;  // for the weight buffers, if any layer is streamed
  // What is left without resident layers, beside the buffers for these numbers of blocks (in either
  // memory), those for the prompts of `host_blocks` more, which host cores attend, and the page tables of the pinned ones;
  // below 0: the buffers do not fit.
  std::function<Bytes(std::int64_t act_blocks, std::int64_t kv_blocks, std::int64_t host_blocks)>
      left;
};

struct Allocation;

// What exists already or was asked for by the user; a policy must not change it.
struct FixedPlacement {
  std::optional<std::int32_t> resident_layers;  // nothing: the policy decides
  // Blocks of each kind on the device; both or neither.
  std::optional<std::uint32_t> gpu_act_blocks, gpu_kv_blocks;
  std::optional<double> gpu_share;  // of each kind's blocks on the device; nothing: as many as fit
  bool gpu_act_alone = false;       // of the kinds, the device keeps ACT blocks alone

  bool fixes_blocks() const { return gpu_act_blocks.has_value(); }
  bool leaves_blocks_free() const { return !fixes_blocks() && !gpu_share && !gpu_act_alone; }
  // Of so many blocks of each kind: `gpu_share` in blocks. Blocks that stand already go before it.
  FixedPlacement for_blocks(std::int64_t act_blocks, std::int64_t kv_blocks) const;
  friend bool operator==(const FixedPlacement&, const FixedPlacement&) = default;
};

// Times of iterations.
struct Rehearsed {
  Seconds decoding;  // every request whose blocks have room generates one token
  Seconds prefill;   // the largest allowed chunk of prompts runs
};

// The inputs of an allocation.
struct AllocationInputs {
  BlockSizes sizes;              // of one layer's block
  std::int32_t layers = 0;       // a block number stands for one block in each of them
  Bytes host;                    // for blocks of all layers
  Bytes layer_copy{};            // additional bytes for each layer whose weights stay on the device
  std::int64_t most_blocks = 0;  // the most that the requests can ever fill at once
  std::int32_t largest_request = 0;  // blocks
  std::int32_t mini_batch = 0;       // blocks that one should hold; 0: any number
  std::int64_t requests = 0;         // in all
  std::int32_t sequences = 0;        // of them, under way at a time
  std::int64_t prompt_rows = 0;      // of the prompts of those
  std::int32_t prefill_rows = 0;     // of prompts in an iteration
  std::int64_t most_tokens =
      0;  // of the contexts of those, if some are dropped; 0: those of most_blocks
  std::optional<DeviceRoom> device = std::nullopt;  // nothing: none, or not known
  bool host_cores = false;                          // may attend sequences where their blocks lie
  // Requests, with so many KV blocks of the host, that host cores attend: they are not among those above,
  // and their blocks are not in `host`.
  std::int32_t host_requests = 0;
  std::int64_t host_blocks = 0;
  FixedPlacement fixed = {};
  // How many layers' weights stay on the device beside buffers for so many blocks of each kind, where
  // the policy places none itself; nothing where that is not known.
  std::function<std::int32_t(std::int64_t act_blocks, std::int64_t kv_blocks,
                             std::int64_t host_blocks)>
      resident_layers = nullptr;
  // Iterations in virtual time (planner/virtual_time/rehearsal.h); nothing where the blocks do not fit.
  std::function<std::optional<Rehearsed>(const Profile& profile, const Allocation& blocks)>
      rehearse = nullptr;
  // All requests from the first prompt to the last answer, likewise; nothing if that would take too
  // long.
  std::function<std::optional<Seconds>(const Profile& profile, const Allocation& blocks)>
      rehearse_job = nullptr;
};

// The answer to the first question. With `placed` the policy also decides what the device holds.
// Otherwise the host's numbers are the totals, and layers, then ACT blocks, then KV blocks go to the
// device as far as there is room (planner/memory/sizes.h).
struct Allocation {
  std::uint32_t act_blocks = 0;      // on the host
  std::uint32_t kv_blocks = 0;       // on the host
  std::uint32_t gpu_act_blocks = 0;  // on the device, in addition
  std::uint32_t gpu_kv_blocks = 0;   // on the device, in addition
  std::int32_t token_blocks = 0;     // of the largest request (Policy::token_blocks)
  // Of the requests under way, those that host cores attend: their blocks are KV blocks of the host. Which
  // requests these are follows from their numbers (attended_on_host).
  double host_share = 0;
  std::uint32_t host_blocks = 0;                // of kv_blocks, those meant for them
  bool placed = false;                          // gpu_… and resident_layers are the policy's
  std::optional<std::int32_t> resident_layers;  // nothing: as many as fit on the device

  std::int64_t all_act_blocks() const { return std::int64_t{act_blocks} + gpu_act_blocks; }
  std::int64_t all_kv_blocks() const { return std::int64_t{kv_blocks} + gpu_kv_blocks; }
  // Without those of requests that host cores attend.
  std::int64_t device_kv_blocks() const {
    return all_kv_blocks() - std::min(host_blocks, kv_blocks);
  }

  // An order to find them by, which means nothing else.
  friend auto operator<=>(const Allocation&, const Allocation&) = default;
};

// Whether a request is one of those that host cores attend. Of neighbouring numbers `host_share` are, so
// of those under way at a time about as many are; and it depends on nothing else, so a request that runs
// again is attended in the same place.
bool attended_on_host(const Allocation& blocks, RequestId request);

// A request for the second question: its blocks without those kept only as token ids.
struct RequestSplit {
  std::int32_t act_blocks = 0;   // that it has
  std::int32_t kv_blocks = 0;    // that it has
  std::int32_t most_blocks = 0;  // that it may have at most, by its prompt and max_tokens
};

// A sequence for the third question: what it adds to a mini-batch.
struct PackItem {
  std::int32_t act_slots = 0;  // blocks of context, those its new rows go to included
  std::int32_t kv_slots = 0;   // likewise, but for KV blocks of the device, which take no buffer
  std::int32_t kv_here = 0;    // those: read in place, nothing crosses
  std::int32_t act_loads = 0;  // blocks that stand already, to be made into K and V
  std::int32_t kv_loads = 0;   // blocks that stand already and take a slot
  std::int32_t rows = 0;       // new tokens, and those that run again
  std::int32_t sequences = 1;  // these rows form
  bool on_host = false;        // host cores attend it: it has no slots and loads nothing
};

// What a mini-batch may hold: #ACT_max, #KV_max and the limits of the device's buffers.
struct PackLimits {
  std::int32_t act_slots = 0;
  std::int32_t kv_slots = 0;
  std::int32_t tokens = 0;  // of those slots; a larger sequence is alone
  std::int32_t rows = 0;
  std::int32_t sequences = 0;
};

using MiniBatchItems = std::vector<std::int32_t>;  // indices into the items

class Policy {
 public:
  virtual ~Policy() = default;
  virtual Allocation allocate(const AllocationInputs& inputs) const = 0;
  virtual BlockKind next_block(const Allocation& host, const RequestSplit& request) const = 0;
  // How many of a request's first blocks are not kept, if it may have `most_blocks`: their tokens run
  // again through all layers in every iteration. `next_block` is called for the others. The number does
  // not fall as requests grow.
  virtual std::int32_t token_blocks(std::int32_t most_blocks) const {
    static_cast<void>(most_blocks);
    return 0;
  }
  // Whether `token_blocks` is above 0 for requests of some length.
  virtual bool runs_tokens_again() const { return false; }
  // Whether the planner may choose fewer requests at a time than allowed (planner/memory/concurrency.h).
  virtual bool chooses_concurrency() const { return false; }
  // Whether a mini-batch is to be as large as the device's buffers can be made, where the user does
  // not say (planner/memory/sizes.h).
  virtual bool fills_the_device() const { return false; }
  // Every item stands in exactly one mini-batch, and no mini-batch breaks a limit.
  // REQUIRES: each item alone fits.
  virtual std::vector<MiniBatchItems> pack(const Allocation& host, std::span<const PackItem> items,
                                           const PackLimits& limits) const = 0;
};

struct PolicyOptions {
  std::optional<double> act_share;        // --act-share
  std::optional<double> recompute_share;  // --recompute-share
  bool row_by_row = false;                // --schedule row-by-row
  std::shared_ptr<const Profile> profile =
      nullptr;  // of the machine and the model; nothing: unknown
};

// What `poise policies` shows.
struct PolicyEntry {
  std::string_view name;
  std::string_view description;
  std::string_view source;  // paper and section
  std::unique_ptr<Policy> (*make)(const PolicyOptions& options);
  bool needs_profile = false;    // unless --act-share decides
  bool attends_on_host = false;  // it cannot do without host cores
};
// Fails with the names there are.
const PolicyEntry& policy_named(std::string_view name);

std::span<const PolicyEntry> policies();
// Fails with the names there are, or if an option does not belong to the policy.
std::unique_ptr<Policy> make_policy(std::string_view name, const PolicyOptions& options);

}  // namespace poise
