#pragma once
// How a run of some requests would be set up: the run's own decisions on policy, sizes and memory, with
// a profile instead of a device. Reads profiles' files; otherwise pure.

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "common/families/quantization.h"
#include "common/model_config.h"
#include "planner/costs/cost_model.h"
#include "planner/costs/costs.h"
#include "planner/memory/placement_options.h"
#include "planner/memory/sizes.h"
#include "planner/policies/policy.h"
#include "planner/requests/request_sizes.h"
#include "planner/requests/run_input.h"
#include "planner/schedule/orders.h"

namespace poise {

// What a run with these arguments would do.
struct PlanOptions {
  InputOptions input;
  std::optional<DType> dtype;  // nothing: as the model says
  Quantization quantization = Quantization::automatic;
  PackWeights pack_weights = PackWeights::off;
  std::optional<std::string> policy, machine;
  std::optional<std::filesystem::path> profile;
  std::filesystem::path profile_dir;
  PolicyOptions policy_options;
  PlacementOptions placement;
  BatchOptions batch;
  std::optional<Bytes> gpu_memory, host_memory;
  std::optional<DeviceKind> device;  // whose kept costs; nothing: of any
  std::int32_t timed = 0;            // instead of the plan: the time of planning so many iterations
  bool check_only = false;           // only checks that policy and costs exist; plans nothing
};

struct SetUp {
  ModelShape shape{};
  DType dtype{};
  Profile profile;
  std::string policy_name;
  std::unique_ptr<Policy> policy;
  Demand demand;
  BatchOptions batch;
  Placement placement;
  Bytes cap, overhead, weights, host_allowed;  // `weights`: those that the host keeps
  std::vector<std::string> notes;              // one sentence for each difference from the options
};

// Fails with numbers if the run would be refused for its size, and if no costs are known.
SetUp set_up(const PlanOptions& options, const ModelConfig& model,
             std::span<const RequestSize> requests);

// The requests that a run would do; fails if there is none.
RequestSizes sizes_of_requests(const PlanOptions& options, const ModelConfig& model);

// The machine of the profile that a plan would use, as a file for --machine.
void export_machine(const PlanOptions& options, const std::filesystem::path& output);

// Only costs and placement: fails as `set_up` and `run` do if the named ones are not possible.
void check_named(const PlanOptions& options, const ModelConfig& model);

}  // namespace poise
