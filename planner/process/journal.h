#pragma once
// What a planner leaves to the next one (RUN/journal): every request that has begun, its tokens so far
// and where its context lies, so that no block is computed again. The planner writes it between two
// iterations, by rename, when it is asked to hand over. The next planner reads and removes it before it
// changes anything, since the journal is true only until then. A killed planner leaves none, and
// unfinished requests are computed again. A journal that is torn, damaged, or of another run, build,
// model, input or pool is not used.
//
//   file: | magic "POISEJNL" | version u32 | crc32c of payload u32 | payload bytes u64 | payload: CBOR |

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "common/blocks.h"
#include "planner/links/executor_link.h"
#include "planner/results/answer_book.h"
#include "planner/schedule/culprit_search.h"
#include "planner/schedule/schedule.h"
#include "planner/virtual_time/prediction.h"

namespace poise {

struct Journal {
  // What it belongs to.
  std::string run_id, build, model, input;
  std::uint64_t pool_epoch = 0;
  PoolPartition partition{};
  std::uint32_t gpu_act_blocks = 0, gpu_kv_blocks = 0;
  std::uint32_t executor = 0;  // epoch of the executor whose device holds the blocks there
  // How far the run is.
  std::uint64_t iteration = 0;
  std::int64_t prompt_tokens = 0, generated_tokens = 0, preemptions = 0, shared_tokens = 0;
  double elapsed = 0;  // seconds
  ExecutorTotals totals;
  Prediction::Figures predicted;
  std::vector<Scheduler::Snapshot> requests;
  std::vector<AnswerBook::Snapshot> answers;
  CulpritSearch::State search;
};

// Durable when it returns. Fails (Exit::busy) if it cannot be written.
void write_journal(const std::filesystem::path& run_dir, const Journal& journal);
bool journal_exists(const std::filesystem::path& run_dir);
// Reads the file and removes it in any case. Fails with a sentence if it is no complete journal.
Journal take_journal(const std::filesystem::path& run_dir);
// If the device is gone, the rows of its blocks are stored again; blocks on the host stay valid. If the
// host's pool is gone, every block is, and requests run again from their beginning. Answers
// stay.
enum class Lost { device, everything };
void lose_blocks(Journal& journal, Lost lost);
// Fails with a sentence if `journal` does not belong to what `now` does (all fields up to the
// partition).
void check_same_work(const Journal& journal, const Journal& now);

}  // namespace poise
