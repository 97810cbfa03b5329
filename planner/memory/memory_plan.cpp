#include "planner/memory/memory_plan.h"

#include "common/weight_layout.h"

namespace poise {
namespace {

constexpr int kMaxTries = 4;
constexpr double kFull = 0.98;  // of the host's memory for blocks; whole blocks leave a little

std::int64_t blocks_of(const Allocation& host) {
  return host.all_act_blocks() + host.all_kv_blocks();
}

// The same blocks, all of them in host memory.
Allocation off_device(const Allocation& blocks) {
  return {.act_blocks = static_cast<std::uint32_t>(blocks.all_act_blocks()),
          .kv_blocks = static_cast<std::uint32_t>(blocks.all_kv_blocks())};
}

class Arranging {
 public:
  Arranging(const Policy& policy, const ModelShape& shape, DType dtype, const Demand& demand,
            const BatchOptions& options, const RunDevice& device,
            std::optional<std::int32_t> resident_layers)
      : policy_(policy),
        shape_(shape),
        dtype_(dtype),
        demand_(demand),
        options_(options),
        device_(device),
        resident_layers_(resident_layers) {}

  MemoryPlan with(BlockBudget budget) const {
    MemoryPlan made;
    // Pinned beside the blocks; weights that stay on the device only until they are there.
    const Bytes pinned_weights = device_.is_host ? Bytes{0} : page_tables_of(budget.weights);
    const DeviceMemory memory{.cap = device_.cap,
                              .overhead = device_.overhead + pinned_weights,
                              .pins_host_memory = !device_.is_host};
    // A device that is host memory takes its buffers from the blocks' share.
    for (int round = 0; round < (device_.is_host ? 2 : 1); ++round) {
      made.host = allocate_host(policy_, shape_, dtype_, demand_, options_, budget,
                                device_.holds_blocks ? std::optional(memory) : std::nullopt);
      if (resident_layers_) {
        made.host.resident_layers = resident_layers_;
      }
      made.overhead = memory.overhead;
      if (!device_.is_host) {
        const auto region = region_bytes(block_sizes(shape_, dtype_), made.host);
        made.overhead += page_tables_of(budget.pool.value_or(
            Bytes{static_cast<std::int64_t>(region) * shape_.num_hidden_layers}));
      }
      const Placement placement =
          device_.holds_blocks
              ? place_blocks(shape_, dtype_, demand_, made.host, options_, made.overhead,
                             device_.cap)
              : Placement{made.host, choose_device_limits(shape_, dtype_, demand_, made.host,
                                                          options_, made.overhead, device_.cap)};
      made.host = placement.host;
      made.device = placement.device;
      budget.device_in_host = plan_device_memory(shape_, dtype_, made.device, Bytes{0}).total;
    }
    return made;
  }

  // The same with so many layers' weights on the device alone; nothing where fewer would then have
  // room there.
  std::optional<MemoryPlan> without_copies(BlockBudget budget, std::int32_t layers) const {
    const Bytes copies = weight_layout(shape_, dtype_).layer.bytes * layers;
    budget.weights = budget.weights - copies;
    budget.available = budget.available + copies;
    MemoryPlan made = with(budget);
    if (made.device.resident_layers < layers) {
      return std::nullopt;
    }
    made.released_layers = made.device.resident_layers;  // the same layers, not only as many
    return made;
  }

 private:
  const Policy& policy_;
  const ModelShape& shape_;
  const DType dtype_;
  const Demand& demand_;
  const BatchOptions& options_;
  const RunDevice& device_;
  const std::optional<std::int32_t> resident_layers_;
};

}  // namespace

MemoryPlan plan_memory(const Policy& policy, const ModelShape& shape, DType dtype,
                       const Demand& demand, const BatchOptions& options, const BlockBudget& budget,
                       const RunDevice& device, std::optional<std::int32_t> resident_layers) {
  const Arranging arranging(policy, shape, dtype, demand, options, device, resident_layers);
  MemoryPlan whole = arranging.with(budget);
  if (resident_layers || budget.pool || !device.holds_blocks) {
    return whole;
  }
  const auto pool_of = [&](const Allocation& blocks) {
    const auto region = region_bytes(block_sizes(shape, dtype), blocks);
    return Bytes{static_cast<std::int64_t>(region) * shape.num_hidden_layers};
  };
  // A policy that places all itself weighs it wherever the host could not hold all blocks: it may have
  // put some on the device that would do better on the host, beside more layers.
  if (whole.host.placed) {
    if (pool_of(off_device(whole.host)).n <
        static_cast<std::int64_t>(kFull * static_cast<double>(bytes_for_blocks(budget).n))) {
      return whole;
    }
    BlockBudget without_copies = budget;
    without_copies.layer_copy = weight_layout(shape, dtype).layer.bytes;
    MemoryPlan made = arranging.with(without_copies);
    made.released_layers =
        pool_of(made.host) > bytes_for_blocks(budget) ? made.device.resident_layers : 0;
    return made;
  }
  if (blocks_of(whole.host) >= demand.most_blocks) {
    return whole;
  }
  // More blocks may leave less room on the device, and so for fewer layers.
  std::int32_t layers = whole.device.resident_layers;
  for (int tries = 0; layers > 0 && tries < kMaxTries; ++tries) {
    if (const auto more = arranging.without_copies(budget, layers)) {
      return blocks_of(more->host) > blocks_of(whole.host) ? *more : whole;
    }
    layers = layers * 7 / 8;
  }
  return whole;
}

}  // namespace poise
