#pragma once
// What a planner leaves to the one after it (RUN/journal): every request that has begun, its tokens
// so far and where its context lies, so that no block is computed again. Written whole between two
// iterations, by rename, when the planner is asked to hand over; taken (read and removed) by the
// next one before it changes anything, since a journal is true only until then. A planner that is
// killed leaves none, and what was unfinished is computed again. Nothing of a journal is believed
// that is torn, damaged, or of another run, build, model, input or pool.
//
//   file: | magic "POISEJNL" | version u32 | crc32c of payload u32 | payload bytes u64 | payload: CBOR |

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "common/blocks.h"
#include "planner/links/executor_link.h"
#include "planner/results/answer_book.h"
#include "planner/schedule/schedule.h"
#include "planner/virtual_time/prediction.h"

namespace poise {

struct Journal {
  // Of what it is.
  std::string run_id, build, model, input;
  std::uint64_t pool_epoch = 0;
  PoolPartition partition{};
  std::uint32_t gpu_act_blocks = 0, gpu_kv_blocks = 0;
  std::uint32_t executor = 0;  // whose device holds what lies there (its epoch)
  // How far the run is.
  std::uint64_t iteration = 0;
  std::int64_t prompt_tokens = 0, generated_tokens = 0, preemptions = 0;
  double elapsed = 0;  // seconds
  ExecutorTotals totals;
  Prediction::Figures predicted;
  std::vector<Scheduler::Snapshot> requests;
  std::vector<AnswerBook::Snapshot> answers;
};

// Durable when it returns. Fails (Exit::busy) where the disk does not take it.
void write_journal(const std::filesystem::path& run_dir, const Journal& journal);
bool journal_exists(const std::filesystem::path& run_dir);
// Removes the file, whatever it holds. Fails with a sentence where it is no whole journal.
Journal take_journal(const std::filesystem::path& run_dir);
// Where the device is gone, the rows of its blocks are stored again; blocks on the host stay valid. With
// the host's pool every block is gone, and requests run from their beginning again. What they answered
// stays.
enum class Lost { device, everything };
void lose_blocks(Journal& journal, Lost lost);
// Fails with a sentence where `journal` is not of what `now` is of (all up to the partition).
void check_same_work(const Journal& journal, const Journal& now);

}  // namespace poise
