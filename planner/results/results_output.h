#pragma once
// The output file: checked before anything is computed, written once at the end, complete or not at all.
// It is made by rename; on another file system, by a copy beside it that is read back and compared before
// the rename. Free functions; one process at a time (run.lock).

#include <filesystem>
#include <optional>
#include <vector>

#include "planner/results/results_file.h"

namespace poise {

// Fails if `output` could not be written at the end, if it exists without `overwrite`, and if it is the
// input itself. Opens no file.
void check_output(const std::filesystem::path& output, const std::filesystem::path& input,
                  bool overwrite);

// Makes the results the `output`, which finishes the run. Fails with Exit::busy if that is not possible;
// everything then stays in the run directory.
// REQUIRES: every line of the input is done.
void publish(ResultsFile results, const std::filesystem::path& run_dir,
             const std::filesystem::path& output, bool overwrite,
             const std::vector<RequestId>& input_lines);

// What the output of a finished run holds. Nothing if it is gone, or does not hold a result for each
// of the run's lines by now: it is the user's.
std::optional<ResultCounts> count_published(const std::filesystem::path& run_dir,
                                            const std::vector<RequestId>& input_lines);

}  // namespace poise
