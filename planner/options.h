#pragma once
// The planner's command line: a run, or one of the small commands that need no other process. Errors
// are reported before any file is opened. Option names may have `_` for `-`.

#include <filesystem>
#include <optional>
#include <string>
#include <variant>

#include "planner/forecast/plan_setup.h"
#include "planner/process/run_options.h"
#include "planner/profile/profile_run.h"
#include "planner/record/inspect.h"
#include "planner/record/log_difference.h"
#include "planner/replay/replay.h"
#include "planner/requests/run_input.h"

namespace poise {

struct ValidateOptions {
  InputOptions input;
};

// JSON strings to JSON arrays of token ids, one a line, from stdin to stdout. Lines that are objects go both ways.
struct EncodeOptions {
  std::filesystem::path model;
};

struct PoliciesOptions {
  bool json = false;
};

struct SimulateOptions {
  std::string name;
  std::optional<std::string> machine;  // instead of the paper's
  bool json = false;                   // as one JSON object
  bool table = false;                  // with `json`: print the table before it
};

// The machine of a kept profile, as a file (costs/machine_file.h). Of `costs` only the model, its dtype and
// which profile count.
struct ExportOptions {
  PlanOptions costs;
  std::filesystem::path output;
};

struct HelpOptions {
  std::string text;
};

using PlannerCommand = std::variant<RunOptions, InspectOptions, LogDiffOptions, ValidateOptions,
                                    EncodeOptions, PoliciesOptions, SimulateOptions, ProfileOptions,
                                    ReplayOptions, PlanOptions, ExportOptions, HelpOptions>;

PlannerCommand parse_planner_arguments(int argc, const char* const* argv);

}  // namespace poise
