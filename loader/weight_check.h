#pragma once
// Compares sealed weights with the digests of their first fill: memory errs, and so do other programs of this user. A pass
// begins with the first tensor and goes through all that are in host memory; what was released meanwhile is left out. One
// thread calls it; with `at_once` it uses all cores.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "common/messages_generated.h"
#include "loader/weight_loading.h"

namespace poise {

class WeightCheck {
 public:
  // `weights` outlives it.
  explicit WeightCheck(WeightLoading& weights) : weights_(weights) {}

  // Begins a pass in place of the one under way.
  void begin(std::uint32_t serial, bool at_once);
  // Checks some more; the answer once the pass is over. A pass waits while weights are being restored.
  std::optional<messages::WeightsCheckedT> advance();
  // A pass is under way, for which a planner waits.
  bool hurries() const { return serial_ && at_once_; }
  bool is_idle() const { return !serial_; }

 private:
  bool check_some(const FilledWeights& filled);
  messages::WeightsCheckedT ended(std::string damage, std::string why_not = {});

  WeightLoading& weights_;
  std::optional<std::uint32_t> serial_;  // of the pass under way
  bool at_once_ = false;
  std::size_t tensor_ = 0;  // the next
  std::int64_t first_ = 0;  // its next unit
  std::uint32_t leaf_ = 0;  // its number
  std::string damage_;
};

}  // namespace poise
