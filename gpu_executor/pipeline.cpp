#include "gpu_executor/pipeline.h"

#include <spdlog/spdlog.h>

#include <exception>
#include <utility>

#include "common/trouble.h"

namespace poise {
namespace {

Device& with_cap(Device& device, const Model& model, const DeviceLimits& limits, Bytes cap) {
  check_fits(plan_device_memory(model.shape, model.dtype, limits, device.overhead()), cap);
  device.set_cap(cap);
  return device;
}

}  // namespace

Pipeline::Pipeline(Device& device, const Model& model, const DeviceLimits& limits, Bytes cap,
                   bool trace, std::shared_ptr<const ResidentWeights> resident,
                   std::shared_ptr<Buffer> kept)
    : device_(with_cap(device, model, limits, cap)),
      shape_(model.shape),
      limits_(limits),
      sizes_(device_sizes(model.shape, model.dtype, limits)),
      tracer_(device, trace),
      host_buffers_(device),
      weights_(device, tracer_, model.shape, model.dtype, model.layout, model.weights, limits,
               resident ? std::move(resident)
                        : std::make_shared<const ResidentWeights>(device, model.shape, model.dtype,
                                                                  model.layout, model.weights,
                                                                  limits.resident_layers)),
      decoder_(device, model.shape, model.dtype, limits),
      hidden_(device.allocate(sizes_.hidden, "hidden states")),
      copies_(device, model.shape, model.dtype, limits, tracer_, std::move(kept)),
      orders_(device, tracer_, host_buffers_, model.shape,
              {kAllStreams,
               static_cast<std::size_t>(limits.host_attention ? kStreams : kDeviceStreams)}),
      outer_(parts(), sizes_),
      layer_(parts(), copies_, model.dtype, limits, model.layout, sizes_) {
  const Bytes planned = device_memory(model.shape, model.dtype, limits, device.overhead());
  check(device.in_use() + device.overhead() == planned, "device memory is what was planned");
}

// A device that has failed fails again here, perhaps while its first failure is on its way to main.
Pipeline::~Pipeline() {
  try {
    device_.finish();
  } catch (const std::exception& problem) {
    spdlog::warn("while a pipeline ends: {}", problem.what());
  }
}

void Pipeline::begin(const messages::Iteration& iteration,
                     std::vector<std::vector<std::uint32_t>> after, const HostBlocks& blocks) {
  auto work = std::make_shared<IterationWork>(
      make_work(iteration, std::move(after), blocks, shape_, limits_, host_buffers_));
  begun_.emplace(iteration.iteration(), std::move(work));
}

void Pipeline::submit(const LayerOrderWork& order) {
  const auto begun = begun_.find(order.iteration);
  check(begun != begun_.end(), "an order's iteration was begun");
  device_.resume();
  RunningOrder running{.seq = order.seq,
                       .stage = order.stage,
                       .mini_batches = order.mini_batches,
                       .work = begun->second};
  if (const auto layer = orders_.layer_of(order.stage)) {
    layer_.run(running, order, *layer, outer_.places(*running.work));
    outer_.read_by_layer(*running.work);
  } else if (order.stage == 0) {
    outer_.run_embedding(running, order);
  } else {
    outer_.run_head(running, order);
    begun_.erase(begun);
  }
  orders_.add(std::move(running));
}

void Pipeline::abandon() {
  begun_.clear();
  weights_.abandon();
}

}  // namespace poise
