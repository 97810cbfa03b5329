#pragma once
// What the user asks of a run: the command line's values, parsed (planner/options.h).

#include <filesystem>
#include <optional>
#include <string>

#include "common/files/order_log_segments.h"
#include "common/units.h"
#include "planner/memory/placement_options.h"
#include "planner/memory/sizes.h"
#include "planner/policies/policy.h"
#include "planner/requests/run_input.h"

namespace poise {

struct RunOptions {
  InputOptions input;
  std::filesystem::path output;
  std::filesystem::path front_socket;  // where requests come from if there is no input; else empty
  std::filesystem::path run_dir;
  std::string run_id;
  std::filesystem::path loader_socket;
  std::filesystem::path executor_socket;
  std::optional<std::string> policy;   // nothing: by the device
  std::optional<std::string> machine;  // whose costs the policy decides by; nothing: unknown
  std::optional<std::filesystem::path> profile;  // a profile to decide by instead
  std::filesystem::path profile_dir;             // measured ones are kept there; empty: nowhere
  PolicyOptions policy_options;
  PlacementOptions placement;
  BatchOptions batch;
  std::optional<Bytes> gpu_memory;
  std::optional<Bytes> host_memory;
  std::string served_model_name;
  std::string grammar_python, grammar_script;  // planner/links/grammar_link.h; empty: there is none
  bool resume = false;
  bool overwrite = false;
  bool verify = false;  // no answer is published before the weights were found sound after it
  bool takes_over = false;  // from a planner of this run that has ended; loader and executor stayed
  OrderLogLimits orders_log;
  bool trace = false;  // the executor reports what its streams did, span by span
  std::string log;
  int death_descriptor = -1;
};

}  // namespace poise
