#pragma once
// What came of a replay: the answers compared, and times by stage beside the recorded ones.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "planner/record/log_digest.h"
#include "planner/replay/answers_compared.h"
#include "planner/replay/stage_times.h"

namespace poise {

class ReplayReport {
 public:
  // Of another repetition, from the log's beginning.
  void begin(std::int32_t layers);
  // An iteration that the log does not finish.
  void skip() { ++skipped_; }
  void take(const messages::LayerDoneT& replayed) { times_.back().add(replayed); }
  void take(const LoggedIteration& recorded, const messages::IterationDoneT& replayed,
            Seconds wall);

  std::uint64_t iterations() const { return compared_.back().iterations(); }
  // One JSON object, of the repetition with the most differences and the times of the fastest. REQUIRES: begun.
  void write(const std::filesystem::path& output, const std::filesystem::path& orders,
             const std::string& device, std::uint64_t link_bytes_per_s, Bytes torn,
             const std::string& missing) const;

 private:
  std::uint64_t skipped_ = 0, rows_ = 0, samples_ = 0;
  std::optional<StageTimes> recorded_;
  std::vector<StageTimes> times_;          // of each repetition
  std::vector<AnswersCompared> compared_;  // likewise
};

}  // namespace poise
