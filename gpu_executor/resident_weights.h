#pragma once
// The weights that stay on the device: the outer slab and the resident layers, uploaded once. They
// outlive a Configure that wants as many layers as there are, since the host may not have them any
// more (WeightsRelease in common/messages.fbs). The device must outlive them.

#include <cstdint>
#include <span>
#include <vector>

#include "gpu_executor/device_weight_map.h"

namespace poise {

class ResidentWeights {
 public:
  // Takes the memory and queues the uploads on copy_in; what computes waits for some load behind
  // them anyway, and so for them.
  ResidentWeights(Device& device, const ModelShape& shape, DType dtype, const WeightLayout& layout,
                  std::span<const std::byte> host, std::int32_t resident_layers);

  std::int32_t layers() const { return resident_layers_; }
  const OuterWeights& outer() const { return outer_; }
  // REQUIRES: resident.
  const LayerWeights& layer(LayerId layer) const { return resident_[layer.n]; }

 private:
  std::int32_t resident_layers_;
  Buffer outer_memory_, resident_memory_;
  OuterWeights outer_;
  std::vector<LayerWeights> resident_;  // by layer; empty where streamed
};

}  // namespace poise
