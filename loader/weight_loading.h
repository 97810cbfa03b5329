#pragma once
// The weight segment from its creation to its seal. The segment is reserved in a thread of its own,
// then filled by all cores (weight_fill.h); `advance` is called again and again by the loader's one
// thread and moves the loader's state in the control segment: creating → loading (the segment is
// there) → sealed (every byte and the fingerprint are). Destroyed, the segment's name goes.
//
// Layers that a device holds may be released, their memory given back, and later restored from where
// they came from: sealed → loading → sealed. Their memory is reserved in that thread first; where there
// is not enough, all is as before.

#include <atomic>
#include <chrono>
#include <future>
#include <optional>
#include <string>
#include <vector>

#include "common/shared_memory.h"
#include "loader/model_on_disk.h"
#include "loader/weight_fill.h"

namespace poise {

class WeightLoading {
 public:
  // `control` and `model` outlive it. The control segment's shape, dtype and sizes are written here.
  WeightLoading(Control& control, const ModelOnDisk& model);
  ~WeightLoading();
  WeightLoading(const WeightLoading&) = delete;
  WeightLoading& operator=(const WeightLoading&) = delete;

  // True where something moved since the last call. Throws what went wrong in the threads.
  bool advance();
  bool has_segment() const { return segment_.has_value(); }
  bool sealed() const { return sealed_; }
  // Memory is being reserved, which shows nowhere.
  bool reserving() const { return !segment_ || reserving_.valid(); }

  // Gives back the memory of the layers that `resident_layers` are (is_resident), and no others.
  // REQUIRES: sealed, nothing released.
  void release(std::int32_t resident_layers);
  // Fills what was released; `advance` tells when it is sealed again. Throws there where the source has
  // other bytes now. REQUIRES: sealed, something released.
  void restore();
  // Why what was to be restored is as it was, released.
  const std::string& why_not_restored() const { return why_not_; }
  std::int32_t released() const { return released_; }
  Bytes released_bytes() const;

 private:
  using Clock = std::chrono::steady_clock;

  bool is_released(LayerId layer) const;
  void begin_filling();
  void begin_filling_again();
  void give_back_released();
  void seal();
  void sealed_again();
  void tell_progress();

  Control& control_;
  const ModelOnDisk& model_;
  std::string name_;
  std::atomic<bool> given_up_{false};  // nobody waits for the segment any more
  std::future<Segment> coming_;
  std::future<void> reserving_;  // of what was released
  std::string why_not_;
  std::optional<Segment> segment_;
  std::optional<WeightFill> fill_;  // until sealed
  std::vector<Digest> leaves_;      // of the first fill
  std::int32_t released_ = 0;       // layers
  bool sealed_ = false;
  std::uint64_t seen_bytes_ = 0;
  Clock::time_point began_;
  Clock::time_point told_;
};

}  // namespace poise
