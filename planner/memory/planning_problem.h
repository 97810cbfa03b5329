#pragma once
// The one planning problem: how many requests run at once, how blocks of context are split between the
// kinds and the two memories, which weights stay on the device, and how large its buffers are. A start,
// a policy swap, a planner that takes over, `poise plan` and simulations all solve it; they differ only
// in what is fixed already (FixedResources). Pure functions.

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "common/shared_layout.h"
#include "planner/memory/sizes.h"

namespace poise {

// The device of a run.
struct RunDevice {
  Bytes cap;
  Bytes overhead;  // of the cap, taken beside buffers, before host memory is pinned
  bool is_host = false;
  bool holds_blocks = true;      // false: the device is host memory, so blocks there save nothing
  bool attends_on_host = false;  // host cores may attend beside it
};

// What exists already and does not change.
struct FixedResources {
  std::optional<PoolPartition> pool;  // the host's: its bytes stay, its border may move
  FixedPlacement placement;           // on the device
  std::int32_t running = 0;           // requests that have blocks
};

struct PlanningProblem {
  ModelShape shape{};
  DType dtype{};
  std::vector<RequestSize> requests;  // not answered yet
  BatchOptions batch;                 // as the user says
  BlockBudget budget;
  RunDevice device;
  std::shared_ptr<const Profile> profile = nullptr;  // null: costs are not known
  FixedResources fixed = {};
  KeptContext kept = {};  // by the policy; `solve` fills it in

  Demand demand(std::int32_t sequences) const {
    return demand_of(requests, sequences, kept, batch.prefill_tokens);
  }
};

struct RunPlan {
  BatchOptions batch;
  Demand demand;
  Allocation host;
  DeviceLimits device;
  // Buffers until an existing pool's border has moved to its place: blocks of both splits are in use.
  DeviceLimits device_meanwhile;
  Bytes overhead;                    // of the device, with the page tables of pinned memory
  std::int32_t released_layers = 0;  // whose weights only the device keeps

  std::int64_t blocks() const { return host.all_act_blocks() + host.all_kv_blocks(); }
};

// Refuses a policy that has host cores attend where the user forbids it.
[[noreturn]] void fail_for_host_attention_off(std::string_view policy);

// Refuses --absorption on for a model whose keys are no linear map of activations.
void check_absorption(const ModelShape& shape, const BatchOptions& batch);

// Fails with numbers if host or device are too small, and where the user asks for what the device does not do.
RunPlan solve(const Policy& policy, const PlanningProblem& problem);

// The plan's buffers until the pool's border is where the plan wants it.
// REQUIRES: the problem has a pool.
DeviceLimits limits_until_border_rests(const PlanningProblem& problem, const RunPlan& plan);

// The host memory of a pool, all layers together.
inline Bytes bytes_of(const PoolPartition& pool, const ModelShape& shape) {
  return {static_cast<std::int64_t>(pool.region_bytes) * shape.num_hidden_layers};
}

// Whether buffers made for `there` suffice for `wanted`, so that the device keeps its configuration.
bool suffices(const DeviceLimits& there, const DeviceLimits& wanted);

}  // namespace poise
