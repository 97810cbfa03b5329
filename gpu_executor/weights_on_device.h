#pragma once
// The model's weights as the device has them: those that stay, and two buffers through which the
// streamed layers pass, piece by piece. Uploads run on copy_in; the compute stream waits for a piece
// when it needs it, and a buffer is overwritten only after the order that computed from it. Packed
// matrices stay packed in all of them; on a device that does not multiply those, the compute stream
// unpacks each once for every order that computes the layer. Lives as long as a Configure; belongs to the
// pipeline.

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "common/device_memory.h"
#include "common/messages_generated.h"
#include "common/model_shape.h"
#include "common/weight_layout.h"
#include "gpu_executor/device.h"
#include "gpu_executor/layer_ledger.h"
#include "gpu_executor/resident_weights.h"
#include "gpu_executor/tracer.h"

namespace poise {

class WeightsOnDevice {
 public:
  // `host`: the weights segment, laid out as `layout` says. REQUIRES: `resident` are the layers that
  // `limits` name.
  WeightsOnDevice(Device& device, Tracer& tracer, const ModelShape& shape, DType dtype,
                  const WeightLayout& layout, std::span<const std::byte> host,
                  const DeviceLimits& limits, std::shared_ptr<const ResidentWeights> resident);

  const OuterWeights& outer() const { return resident_->outer(); }

  // Queues on copy_in those of an order's fetches that come behind the loads of a mini-batch; returns
  // their bytes. Fails as LayerLedger does.
  Bytes fetch_behind(std::uint32_t mini_batch, std::span<const messages::WeightFetch> fetches);

  // Between the two an order computes the layer; `need` makes the compute stream wait for the
  // pieces a weight is in, whose fetches must have been queued.
  const LayerWeights& begin(LayerId layer);
  void need(Weight weight);
  // Before the first launch that reads a matrix, behind its `need`.
  void unpack(Weight matrix);
  void end();

  void abandon() { ledger_.abandon(); }

 private:
  struct Streamed {
    Buffer memory;
    LayerWeights weights;
    std::vector<std::unique_ptr<Event>> arrived;  // by piece; recorded on copy_in
    std::unique_ptr<Event> computed;              // the last order that used it; on compute
  };

  Bytes fetch(LayerId layer, std::uint32_t piece, std::uint32_t mini_batch);

  Device& device_;
  Tracer& tracer_;
  DeviceWeightMap map_;
  LayerLedger ledger_;
  std::shared_ptr<const ResidentWeights> resident_;
  std::array<Streamed, 2> streamed_;

  // Where the device multiplies no packed matrices: room for one layer's as numbers, which the compute
  // stream alone uses.
  Buffer unpacked_;

  std::optional<int> buffer_in_use_;      // between begin and end, where the layer is streamed
  std::uint64_t needed_ = 0;              // pieces waited for since begin
  const LayerWeights* stored_ = nullptr;  // since begin; as they came
  LayerWeights multiplied_;               // what the launches read of it
  std::uint32_t made_ = 0;                // matrices unpacked since begin
};

}  // namespace poise
