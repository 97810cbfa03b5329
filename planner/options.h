#pragma once
// The planner's command line: a run, or one of the small commands that need no other process. Errors
// are reported before any file is opened. Option names may have `_` for `-`.

#include <filesystem>
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
  bool table = false;  // with `json`: print the table before it
};

struct HelpOptions {
  std::string text;
};

using PlannerCommand = std::variant<RunOptions, InspectOptions, LogDiffOptions, ValidateOptions,
                                    EncodeOptions, PoliciesOptions, SimulateOptions, ProfileOptions,
                                    ReplayOptions, PlanOptions, HelpOptions>;

PlannerCommand parse_planner_arguments(int argc, const char* const* argv);

}  // namespace poise
