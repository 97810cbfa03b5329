#pragma once
// How long the device's streams worked and waited in each stage, summed over iterations.

#include <cstdint>
#include <vector>

#include "common/messages_generated.h"
#include "common/units.h"

namespace poise {

struct StageTime {
  Seconds copy_in{}, compute{}, copy_out{};   // busy
  Seconds host{};                             // busy: host cores
  Seconds waits{};                            // computation waited for another stream
  std::uint64_t bytes_in = 0, bytes_out = 0;  // copied
};

// By stage: embedding, decoder layers, head.
class StageTimes {
 public:
  explicit StageTimes(std::size_t stages) : stages_(stages) {}

  // An order's report; one that names no stage of the model is ignored.
  void add(const messages::LayerDoneT& done);
  void add_iteration(Seconds wall) { wall_ += wall; }

  const std::vector<StageTime>& stages() const { return stages_; }
  Seconds wall() const { return wall_; }  // of all iterations, from their tables to their answers

 private:
  std::vector<StageTime> stages_;
  Seconds wall_{};
};

}  // namespace poise
