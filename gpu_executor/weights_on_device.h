#pragma once
// The model's weights as the device has them: those that stay, and two buffers through which the
// streamed layers pass, piece by piece. Uploads run on copy_in; the compute stream waits for a piece
// when it needs it, and a buffer is overwritten only after the order that computed from it. Lives as
// long as a Configure; belongs to the pipeline.

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "common/device_memory.h"
#include "common/model_shape.h"
#include "common/weight_layout.h"
#include "gpu_executor/device.h"
#include "gpu_executor/layer_buffers.h"
#include "gpu_executor/resident_weights.h"

namespace poise {

class WeightsOnDevice {
 public:
  // `host`: the weights segment, laid out as `layout` says. REQUIRES: `resident` are the layers that
  // `limits` name.
  WeightsOnDevice(Device& device, const ModelShape& shape, DType dtype, const WeightLayout& layout,
                  std::span<const std::byte> host, const DeviceLimits& limits,
                  std::shared_ptr<const ResidentWeights> resident);

  const OuterWeights& outer() const { return resident_->outer(); }

  // Queues a piece of a streamed layer on copy_in; returns its bytes. Fails as LayerBuffers does.
  // `begins` is called when the wait for room is queued and the copy is not.
  Bytes fetch(LayerId layer, std::uint32_t piece, const std::function<void()>& begins);

  // Between the two an order computes the layer; `need` makes the compute stream wait for the
  // pieces a weight is in, whose fetches must have been queued.
  const LayerWeights& begin(LayerId layer);
  void need(Weight weight);
  void end();

  void abandon() { ledger_.abandon(); }

 private:
  struct Streamed {
    Buffer memory;
    LayerWeights weights;
    std::vector<std::unique_ptr<Event>> arrived;  // by piece; recorded on copy_in
    std::unique_ptr<Event> computed;              // the last order that used it; on compute
  };

  Device& device_;
  WeightPlaces places_;
  LayerBuffers ledger_;
  std::shared_ptr<const ResidentWeights> resident_;
  std::array<Streamed, 2> streamed_;

  std::optional<int> buffer_in_use_;  // between begin and end, where the layer is streamed
  std::uint64_t needed_ = 0;          // pieces waited for since begin
};

}  // namespace poise
