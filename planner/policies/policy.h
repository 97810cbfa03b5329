#pragma once
// A policy answers the planner's three questions (common/README section 5): how is the host's pool split
// between ACT and KV blocks, of which kind is a request's next block, and which sequences form a
// mini-batch. Answers are functions of the arguments alone: no clock, socket, file or log, so that
// the same code plans a run, a dry run and a simulated one; an object holds only the options it was
// made with and may be shared by threads. Whatever a policy answers changes the time of a run and
// never its tokens (common/README section 8).

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

// The device's memory, as far as it is free for a policy to use.
struct DeviceRoom {
  Bytes layer;      // takes the weights of one that stays on the device
  Bytes streaming;  // take the buffers for those that do not, where there is one
  // What is left, without any layer, beside the buffers for so many blocks of each kind (wherever
  // they lie) and what pinning them on the host takes; below 0: the buffers do not fit.
  std::function<Bytes(std::int64_t act_blocks, std::int64_t kv_blocks)> left;
};

struct Allocation;

// What stands already, or was asked for by the user, and is not the policy's to change.
struct FixedPlacement {
  std::optional<std::int32_t> resident_layers;  // nothing: as many as the policy likes
  // Blocks of each kind on the device; both or neither.
  std::optional<std::uint32_t> gpu_act_blocks, gpu_kv_blocks;

  bool fixes_blocks() const { return gpu_act_blocks.has_value(); }
  friend bool operator==(const FixedPlacement&, const FixedPlacement&) = default;
};

// How long iterations take.
struct Rehearsed {
  Seconds decoding;  // in which as many requests as there are blocks for generate one token each
  Seconds prefill;   // in which a chunk of prompts runs, as large as may run at once
};

// What an allocation is decided from.
struct AllocationInputs {
  BlockSizes sizes;                  // of one layer's block
  std::int32_t layers = 0;           // a block number stands for one block in each of them
  Bytes host;                        // for blocks of all layers
  Bytes layer_copy{};                // more of it for each layer whose weights stay on the device
  std::int64_t most_blocks = 0;      // all that the requests could ever fill at once
  std::int32_t largest_request = 0;  // blocks
  std::int32_t mini_batch = 0;       // blocks that one is wished to hold; 0: any number
  std::int64_t requests = 0;         // in all
  std::int32_t sequences = 0;        // of them, under way at a time
  std::int64_t prompt_rows = 0;      // of the prompts of those
  std::int32_t prefill_rows = 0;     // of prompts in an iteration
  std::optional<DeviceRoom> device = std::nullopt;  // nothing: none, or not known
  FixedPlacement fixed = {};
  // Iterations in virtual time (planner/virtual_time/rehearsal.h); nothing where the blocks do not fit.
  std::function<std::optional<Rehearsed>(const Profile& profile, const Allocation& blocks)>
      rehearse = nullptr;
  // All requests from the first prompt to the last answer, likewise; nothing where that would take
  // too long.
  std::function<std::optional<Seconds>(const Profile& profile, const Allocation& blocks)>
      rehearse_job = nullptr;
};

// The answer to the first question. A policy that decides what the device holds says so (`placed`);
// otherwise the host's blocks are all the blocks there shall be, and layers, then ACT blocks, then KV
// blocks go to the device as far as there is room (planner/memory/sizes.h).
struct Allocation {
  std::uint32_t act_blocks = 0;                 // on the host
  std::uint32_t kv_blocks = 0;                  // on the host
  std::uint32_t gpu_act_blocks = 0;             // on the device, beside those
  std::uint32_t gpu_kv_blocks = 0;              // on the device, beside those
  std::int32_t token_blocks = 0;                // of the largest request (Policy::token_blocks)
  bool placed = false;                          // gpu_… and resident_layers are the policy's
  std::optional<std::int32_t> resident_layers;  // nothing: as many as fit on the device

  std::int64_t all_act_blocks() const { return std::int64_t{act_blocks} + gpu_act_blocks; }
  std::int64_t all_kv_blocks() const { return std::int64_t{kv_blocks} + gpu_kv_blocks; }

  friend bool operator==(const Allocation&, const Allocation&) = default;
};

// A request as the second question sees it: its blocks behind those kept as token ids alone.
struct RequestSplit {
  std::int32_t act_blocks = 0;   // it has
  std::int32_t kv_blocks = 0;    // it has
  std::int32_t most_blocks = 0;  // it may come to have, by its prompt and max_tokens
};

// A sequence as the third question sees it: what it brings into a mini-batch.
struct PackItem {
  std::int32_t act_slots = 0;  // blocks of context, those its new rows go to included
  std::int32_t kv_slots = 0;
  std::int32_t act_loads = 0;  // of them, blocks that must be loaded and made into K and V
  std::int32_t kv_loads = 0;   // of them, blocks that must be loaded
  std::int32_t rows = 0;       // new tokens, and those that run again
  std::int32_t sequences = 1;  // these rows form
};

// What a mini-batch may hold: #ACT_max, #KV_max and the limits of the device's buffers.
struct PackLimits {
  std::int32_t act_slots = 0;
  std::int32_t kv_slots = 0;
  std::int32_t tokens = 0;  // context and new, counted in blocks; a sequence beyond it goes alone
  std::int32_t rows = 0;
  std::int32_t sequences = 0;
};

using MiniBatchItems = std::vector<std::int32_t>;  // indices into the items

class Policy {
 public:
  virtual ~Policy() = default;
  virtual Allocation allocate(const AllocationInputs& inputs) const = 0;
  virtual BlockKind next_block(const Allocation& host, const RequestSplit& request) const = 0;
  // How many of the first blocks of a request that may come to have `most_blocks` are kept nowhere:
  // their tokens run again, through all layers, in every iteration. `next_block` is asked for the
  // others. Never more for a smaller request.
  virtual std::int32_t token_blocks(std::int32_t most_blocks) const {
    static_cast<void>(most_blocks);
    return 0;
  }
  // Whether fewer requests than a user allows may be under way at a time (planner/memory/concurrency.h).
  virtual bool chooses_concurrency() const { return false; }
  // Every item stands in exactly one mini-batch, and no mini-batch breaks a limit.
  // REQUIRES: each item alone fits.
  virtual std::vector<MiniBatchItems> pack(const Allocation& host, std::span<const PackItem> items,
                                           const PackLimits& limits) const = 0;
};

struct PolicyOptions {
  std::optional<double> act_share;        // --act-share
  std::optional<double> recompute_share;  // --recompute-share
  std::shared_ptr<const Profile> profile =
      nullptr;  // of the machine and the model; nothing: unknown
};

// What `poise policies` shows.
struct PolicyEntry {
  std::string_view name;
  std::string_view description;
  std::string_view source;  // paper and section
  std::unique_ptr<Policy> (*make)(const PolicyOptions& options);
  bool needs_profile = false;  // unless --act-share decides
};
// Fails with the names there are.
const PolicyEntry& policy_named(std::string_view name);

std::span<const PolicyEntry> policies();
// Fails with the names there are, or where an option does not belong to the policy.
std::unique_ptr<Policy> make_policy(std::string_view name, const PolicyOptions& options);

}  // namespace poise
