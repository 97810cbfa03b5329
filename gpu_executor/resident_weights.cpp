#include "gpu_executor/resident_weights.h"

namespace poise {

ResidentWeights::ResidentWeights(Device& device, const ModelShape& shape, DType dtype,
                                 const WeightLayout& layout, std::span<const std::byte> host,
                                 std::int32_t resident_layers)
    : resident_layers_(resident_layers), resident_(static_cast<std::size_t>(layout.layers)) {
  const DeviceWeightMap map(device, shape, dtype, layout, host);
  outer_memory_ = device.allocate(map.outer_bytes(), "outer weights");
  resident_memory_ = device.allocate(map.layer_bytes() * resident_layers, "resident weights");
  outer_ = map.outer_at(outer_memory_.data());
  // Nothing fails any more: only now copies may be under way.
  map.upload_outer(outer_memory_.data());
  std::byte* next = resident_memory_.data();
  for (std::uint32_t layer = 0; layer < resident_.size(); ++layer) {
    if (is_resident({.resident_layers = resident_layers}, {layer}, layout.layers)) {
      resident_[layer] = map.layer_at(next);
      map.upload_layer({layer}, next);
      next += map.layer_bytes().n;
    }
  }
}

}  // namespace poise
