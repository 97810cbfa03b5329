#include "planner/results/results_start.h"

#include "common/files/order_log_segments.h"
#include "common/files/regular_file.h"
#include "common/trouble.h"
#include "planner/results/results_directory.h"

namespace poise {
namespace {

void note_verified(const std::filesystem::path& run_dir, bool verify, Bytes size) {
  if (verify) {
    write_verified(run_dir, size);
  } else {
    remove_verified(run_dir);
  }
}

}  // namespace

bool replaces_finished_run(const std::filesystem::path& run_dir, bool resume) {
  return !resume && run_state(run_dir) == RunState::finished;
}

void check_run_directory(const std::filesystem::path& run_dir, bool resume) {
  if (!resume && run_state(run_dir) == RunState::unfinished) {
    fail(
        "{} holds an unfinished run; go on with it (--resume), or use another directory "
        "(--run-dir)",
        shown(run_dir.string(), 300));
  }
}

std::optional<ResultsFile> open_results(const std::filesystem::path& run_dir, bool resume,
                                        const Manifest& manifest,
                                        const std::vector<RequestId>& input_lines, bool verify) {
  check_run_directory(run_dir, resume);
  const RunState state = run_state(run_dir);
  if (resume && state != RunState::fresh) {
    const auto then = read_manifest(run_dir);
    if (!then) {
      fail(Exit::foreign,
           "{} holds results but no manifest.json that says of what; use another "
           "run directory",
           shown(run_dir.string(), 300));
    }
    check_same_run(run_dir, *then, manifest);
    if (state == RunState::finished) {
      return std::nullopt;
    }
    ResultsFile results = ResultsFile::resume(run_dir, input_lines, read_verified(run_dir));
    note_verified(run_dir, verify, results.size());
    return results;
  }
  // In this order a kill at any point leaves no finished run under another run's manifest or without its orders, and no results
  // without a manifest or behind another run's orders.
  remove_publication(run_dir);
  remove_log(run_dir / kOrdersName);
  write_manifest(run_dir, manifest);
  note_verified(run_dir, verify, Bytes{0});
  return ResultsFile::create(run_dir);
}

}  // namespace poise
