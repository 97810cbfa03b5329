#pragma once
// The weight segment from its creation to its seal. A thread of its own reserves the segment, then all
// cores fill it (weight_fill.h). The loader's one thread calls `advance` repeatedly, which moves the
// loader's state in the control segment: creating → loading (the segment exists) → sealed (every byte
// and the fingerprint are there). The destructor removes the segment's name.
//
// Layers that a device holds may be released: their memory is given back, and they are later restored
// from their source: sealed → loading → sealed. That thread first reserves their memory; if there is
// not enough, they stay released.

#include <atomic>
#include <chrono>
#include <filesystem>
#include <functional>
#include <future>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "common/shared_memory.h"
#include "loader/model_on_disk.h"
#include "loader/weight_fill.h"

namespace poise {

// Whole weights, the tensors that they are made of, and the digests of their leaves (weight_fill.h), in this order.
struct FilledWeights {
  const WeightSource& source;
  std::span<const std::byte> segment;
  std::span<const Digest> leaves;
};

class WeightLoading {
 public:
  struct Origin {
    // A file for the digests of the weights, which a successor needs to restore released layers.
    std::filesystem::path leaves;
    // Opens the model's files if released layers are restored, and may fail. Empty: the model has its source.
    std::function<ModelOnDisk()> open;
  };

  // `control` and `model` outlive it. With a source, the control segment's shape, dtype and sizes are written
  // here. Without, it adopts the sealed weights of a loader that has ended, and reads none of them; then the
  // fingerprint must be ready.
  WeightLoading(Control& control, ModelOnDisk& model, Origin origin);
  ~WeightLoading();
  WeightLoading(const WeightLoading&) = delete;
  WeightLoading& operator=(const WeightLoading&) = delete;

  // True if the state changed since the last call. Rethrows the failure of a thread.
  bool advance();
  bool has_segment() const { return segment_.has_value(); }
  bool sealed() const { return sealed_; }
  // True while memory is being reserved, which no progress counter shows.
  bool reserving() const { return !segment_ || reserving_.valid(); }

  // The weights stay for a successor. REQUIRES: sealed.
  void leave();
  // Removes the segment's name; its memory is given back on destruction.
  void unlink();
  // Gives back the memory of the layers that are resident (is_resident) with this number.
  // REQUIRES: sealed, nothing released.
  void release(std::int32_t resident_layers);
  // Fills the released layers again; `advance` seals the segment then, and throws if the source's bytes
  // have changed. REQUIRES: sealed, something released.
  void restore();
  // Why the released layers could not be restored.
  const std::string& why_not_restored() const { return why_not_; }
  std::int32_t released() const { return released_; }
  Bytes released_bytes() const;
  // To compare the weights with what they were. An adopted model's files are opened for their tensors' names and sizes,
  // which may fail. REQUIRES: sealed.
  FilledWeights filled();
  // Whether a slab (0: outer, 1 + l: layer l) is in host memory.
  bool holds(std::uint32_t slab) const { return slab == 0 || !is_released({slab - 1}); }
  // As the segment's.
  void forget_pages(std::uint64_t offset, Bytes bytes) const {
    segment_->forget_pages(offset, bytes);
  }

 private:
  using Clock = std::chrono::steady_clock;

  void adopt();
  bool is_released(LayerId layer) const;
  void begin_filling();
  void begin_filling_again();
  void give_back_released();
  void open_source();
  void seal();
  void sealed_again();
  void tell_progress();

  Control& control_;
  ModelOnDisk& model_;
  Origin origin_;
  bool left_ = false;
  std::atomic<bool> given_up_{false};  // the segment is no longer needed
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
