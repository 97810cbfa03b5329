#pragma once
// How a run of some requests would be set up: the run's own decisions on policy, sizes and memory, with
// a profile in the place of its device. Reads profiles' files; else pure.

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "common/model_config.h"
#include "planner/cost_model.h"
#include "planner/options.h"
#include "planner/orders.h"
#include "planner/policy.h"
#include "planner/request_sizes.h"
#include "planner/sizes.h"

namespace poise {

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
  std::vector<std::string> notes;  // where it is not as the options say, a sentence each
};

// Fails, with numbers, where the run would be refused for its size, and where no costs are known.
SetUp set_up(const PlanOptions& options, const ModelConfig& model,
             std::span<const RequestSize> requests);

// The costs alone: fails as `set_up` and `run` do where those that were named cannot be had.
void check_named_costs(const PlanOptions& options, const ModelConfig& model);

}  // namespace poise
