#pragma once
// The output file: looked at before anything is computed, written once at the end, whole or not at
// all. Its name appears by rename; where it lies on another file system, by a copy beside it that
// was read back and compared first. Free functions; one process at a time (run.lock).

#include <filesystem>

#include "planner/results/results_file.h"

namespace poise {

// Fails where `output` could not be written at the end, where it exists and `overwrite` is not
// said, and where it is the input itself. Opens nothing.
void check_output(const std::filesystem::path& output, const std::filesystem::path& input,
                  bool overwrite);

// Every input line has its result: they become `output`, and the run is finished. Fails with
// Exit::busy where that cannot be done; everything stays in the run directory then.
// REQUIRES: every line of the input is done.
void publish(ResultsFile results, const std::filesystem::path& run_dir,
             const std::filesystem::path& output, bool overwrite,
             const std::vector<RequestId>& input_lines);

}  // namespace poise
