#pragma once
// A policy answers the planner's three questions (README section 5): how is the host's pool split
// between ACT and KV blocks, of which kind is a request's next block, and which sequences form a
// mini-batch. Answers are functions of the arguments alone: no clock, socket, file or log, so that
// the same code plans a run, a dry run and a simulated one; an object holds only the options it was
// made with and may be shared by threads. Whatever a policy answers changes the time of a run and
// never its tokens (README section 8).

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/blocks.h"
#include "common/units.h"
#include "planner/cost_model.h"

namespace poise {

// What an allocation is decided from.
struct AllocationInputs {
  BlockSizes sizes;                  // of one layer's block
  std::int32_t layers = 0;           // a block number stands for one block in each of them
  Bytes host;                        // for blocks of all layers
  std::int64_t most_blocks = 0;      // all that the requests could ever fill at once
  std::int32_t largest_request = 0;  // blocks
  std::int32_t mini_batch = 0;       // blocks that one is wished to hold; 0: any number
};

// The answer to the first question. A policy that puts other things elsewhere (weights or ACT
// blocks on the GPU, a share of context made again from token ids) says so here; what is left at
// its default is decided by what is left over.
struct Allocation {
  std::uint32_t act_blocks = 0;                 // on the host
  std::uint32_t kv_blocks = 0;                  // on the host
  std::uint32_t gpu_act_blocks = 0;             // on the device, beside those
  std::optional<std::int32_t> resident_layers;  // nothing: as many as fit on the device

  std::int64_t all_act_blocks() const { return std::int64_t{act_blocks} + gpu_act_blocks; }

  friend bool operator==(const Allocation&, const Allocation&) = default;
};

// A request as the second question sees it. The next block covers positions
// 16 · (act_blocks + kv_blocks) and up.
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
  std::int32_t rows = 0;       // new tokens
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
  // Every item stands in exactly one mini-batch, and no mini-batch breaks a limit.
  // REQUIRES: each item alone fits.
  virtual std::vector<MiniBatchItems> pack(const Allocation& host, std::span<const PackItem> items,
                                           const PackLimits& limits) const = 0;
};

struct PolicyOptions {
  std::optional<double> act_share;  // --act-share
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
