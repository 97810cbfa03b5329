#pragma once
// How a run begins, goes on or turns out to be finished, decided from its directory: the one place
// that knows what --resume means. Nothing of an earlier run is destroyed on the way. One process at
// a time (run.lock).

#include <filesystem>
#include <optional>
#include <vector>

#include "planner/results/manifest.h"
#include "planner/results/results_file.h"

namespace poise {

// Fails where the directory holds an unfinished run and `resume` is not said: both ways on are in
// the sentence. Needs no model and no input: for a refusal before anything is loaded.
void check_run_directory(const std::filesystem::path& run_dir, bool resume);

// The results to go on with, or nothing where the run is finished (its output is then untouched).
// Fails with Exit::foreign where the directory belongs to another run. `manifest` is of this run;
// `input_lines` are those that want a result, in order.
std::optional<ResultsFile> open_results(const std::filesystem::path& run_dir, bool resume,
                                        const Manifest& manifest,
                                        const std::vector<RequestId>& input_lines);

}  // namespace poise
