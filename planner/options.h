#pragma once
// The planner's command line: one run, or one of the small commands that need no other process.
// What is wrong with it fails before anything is opened. `_` may stand for `-` in option names.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <variant>

#include "common/units.h"
#include "planner/costs.h"
#include "planner/policy.h"
#include "planner/sizes.h"

namespace poise {

// Where a run's answers come from; also all that `validate` needs.
struct InputOptions {
  std::filesystem::path model;
  std::filesystem::path input;
  std::optional<std::int32_t> max_model_len;  // tokens of prompt and answer together
  std::string served_model_name;              // empty: the user gave the model no name
  std::uint64_t seed = 0;
  bool skip_tokenizer_init = false;
};

struct RunOptions {
  InputOptions input;
  std::filesystem::path output;
  std::filesystem::path run_dir;
  std::string run_id;
  std::filesystem::path loader_socket;
  std::filesystem::path executor_socket;
  std::optional<std::string> policy;   // nothing: by the device
  std::optional<std::string> machine;  // whose costs the policy decides by; nothing: unknown
  std::optional<std::filesystem::path> profile;  // whose costs it decides by instead
  std::filesystem::path profile_dir;             // measured ones are kept there; empty: nowhere
  PolicyOptions policy_options;
  BatchOptions batch;
  std::optional<Bytes> gpu_memory;
  std::optional<Bytes> host_memory;
  std::string served_model_name;
  bool resume = false;
  bool overwrite = false;
  bool takes_over = false;  // from a planner of this run that has ended; loader and executor stayed
  bool trace = false;       // the executor reports what its streams did, piece by piece
  std::string log;
  int death_descriptor = -1;
};

// Measures what everything costs; links and logs as a run's.
struct ProfileOptions {
  std::filesystem::path run_dir;
  std::string run_id;
  std::filesystem::path loader_socket;
  std::filesystem::path executor_socket;
  std::filesystem::path output;  // the profile
  std::optional<Bytes> gpu_memory;
  std::optional<Bytes> host_memory;
  std::string log;
  int death_descriptor = -1;
};

// What a run with these arguments would do.
struct PlanOptions {
  InputOptions input;
  std::optional<DType> dtype;  // nothing: as the model says
  std::optional<std::string> policy, machine;
  std::optional<std::filesystem::path> profile;
  std::filesystem::path profile_dir;
  PolicyOptions policy_options;
  BatchOptions batch;
  std::optional<Bytes> gpu_memory, host_memory;
  DeviceChoice device = DeviceChoice::any;  // whose kept costs
  bool check_only = false;  // whether policy and costs can be had; nothing is planned
};

struct InspectOptions {
  std::filesystem::path log;
  bool json = false;
  bool check = false;  // whether every order holds, instead of the orders
  std::optional<std::uint64_t> iteration;
  std::optional<std::uint32_t> layer;
};

struct ValidateOptions {
  InputOptions input;
};

// JSON strings to JSON arrays of token ids, one a line, from stdin to stdout.
struct EncodeOptions {
  std::filesystem::path model;
};

struct PoliciesOptions {
  bool json = false;
};

struct SimulateOptions {
  std::string name;
  bool json = false;   // as one JSON object
  bool table = false;  // with `json`: the table, too, before it
};

struct HelpOptions {
  std::string text;
};

using PlannerCommand =
    std::variant<RunOptions, InspectOptions, ValidateOptions, EncodeOptions, PoliciesOptions,
                 SimulateOptions, ProfileOptions, PlanOptions, HelpOptions>;

PlannerCommand parse_planner_arguments(int argc, const char* const* argv);

}  // namespace poise
