#pragma once
// Runs layer orders on a device so that copies in, computation and copies out overlap, over mini-batches,
// layers and iterations: the next layer's first mini-batch loads behind the last of this one, also over
// head and embedding to the next iteration, so the streams do not drain in between. What each kind of
// stage queues, and what waits for what: layer_stage.h (a decoder layer), outer_stages.h (embedding and
// head), block_copies.h (blocks and new rows), weights_on_device.h (weights).
//
// `submit` only queues; `poll` returns what is finished. Orders come checked (order_check/order_check.h), in the
// order they are to run. Owns all device memory of one Configure, exactly as planned. One thread.

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "common/messages_generated.h"
#include "gpu_executor/block_copies.h"
#include "gpu_executor/decoder.h"
#include "gpu_executor/device.h"
#include "gpu_executor/layer_stage.h"
#include "gpu_executor/outer_stages.h"
#include "gpu_executor/running_orders.h"
#include "gpu_executor/tracer.h"
#include "gpu_executor/weights_on_device.h"
#include "gpu_executor/work.h"

namespace poise {

// The model as the control segment describes it and the weights segment holds it.
struct Model {
  ModelShape shape{};
  DType dtype{};
  WeightLayout layout{};
  std::span<const std::byte> weights;
};

class Pipeline {
 public:
  // Fails, with the plan's numbers, where the buffers are more than `cap`. `trace`: reports hold
  // spans. `resident`: as many layers as `limits` name; nothing: they are uploaded now. `kept`: the
  // blocks on the device of the pipeline before, which stay valid where there are as many now.
  Pipeline(Device& device, const Model& model, const DeviceLimits& limits, Bytes cap,
           bool trace = false, std::shared_ptr<const ResidentWeights> resident = nullptr,
           std::shared_ptr<Buffer> kept = nullptr);
  ~Pipeline();  // waits for what is queued
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;

  // An iteration whose orders will come. `after` is the order check's.
  void begin(const messages::Iteration& iteration, std::vector<std::vector<std::uint32_t>> after,
             const HostBlocks& blocks);
  void submit(const LayerOrderWork& order);
  // No more orders come for the iterations begun and not finished; what is queued still runs.
  void abandon();

  // The next finished order, waiting at most `timeout` for one. Fails (Exit::interrupted) where the
  // device failed.
  std::optional<OrderDone> poll(Seconds timeout = {0}) { return orders_.poll(timeout); }
  bool idle() const { return orders_.empty(); }
  // The blocks on the device, for the pipeline after this one.
  const std::shared_ptr<Buffer>& blocks() const { return copies_.blocks(); }
  // Waits for all that is queued; their reports still come from `poll`.
  void finish() { device_.finish(); }

  Bytes device_bytes() const { return device_.in_use(); }

 private:
  StageParts parts() {
    return {device_, tracer_, weights_, decoder_, orders_, reinterpret_cast<float*>(hidden_.data()),
            shape_};
  }

  Device& device_;
  const ModelShape shape_;
  const DeviceLimits limits_;
  const DeviceSizes sizes_;
  Tracer tracer_;
  HostBuffers host_buffers_;
  WeightsOnDevice weights_;
  Decoder decoder_;
  Buffer hidden_;
  BlockCopies copies_;
  RunningOrders orders_;
  OuterStages outer_;
  LayerStage layer_;
  std::map<std::uint64_t, std::shared_ptr<IterationWork>> begun_;  // their last order has not come
};

}  // namespace poise
