#pragma once
// Decides from a run's directory whether the run begins, continues or is finished. Which lines
// of unfinished results are kept is decided by results_file.h. It destroys nothing of an unfinished run. One process at a time
// (run.lock).

#include <filesystem>
#include <optional>
#include <vector>

#include "planner/results/manifest.h"
#include "planner/results/results_file.h"

namespace poise {

// Fails if the directory holds an unfinished run and `resume` is not set; the sentence names both
// remedies. Needs no model and no input, so that it can refuse before anything is loaded.
void check_run_directory(const std::filesystem::path& run_dir, bool resume);

// Whether the results that a run begins here replace those of a finished run. That run is lost with `open_results`, so the planner
// calls it then only when nothing can refuse the run any more.
bool replaces_finished_run(const std::filesystem::path& run_dir, bool resume);

// The results to continue with, or nothing if the run is finished (its output is then untouched). Of a run that begins, what
// an earlier run left in the directory is removed: its publication first, then its orders.
// Fails with Exit::foreign if the directory belongs to another run. `manifest` is of this run;
// `input_lines` are those that want a result, in order. `verify`: of this run. Where the one before
// it verified, only those results are kept which it found to come from sound weights.
std::optional<ResultsFile> open_results(const std::filesystem::path& run_dir, bool resume,
                                        const Manifest& manifest,
                                        const std::vector<RequestId>& input_lines, bool verify);

}  // namespace poise
