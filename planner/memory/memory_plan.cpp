#include "planner/memory/memory_plan.h"

#include <tuple>

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

class MemoryPlanner {
 public:
  MemoryPlanner(const Policy& policy, const PlanningProblem& problem, const Demand& demand)
      : policy_(policy), problem_(problem), demand_(demand) {}

  MemoryPlan with(BlockBudget budget) const {
    const auto& [shape, dtype, device] = std::tie(problem_.shape, problem_.dtype, problem_.device);
    const FixedPlacement& fixed = problem_.fixed.placement;
    MemoryPlan made;
    // Pinned beside the blocks; weights that stay on the device only until they are there.
    const Bytes pinned_weights = device.is_host ? Bytes{0} : page_tables_of(budget.weights);
    const DeviceMemory memory{.cap = device.cap,
                              .overhead = device.overhead + pinned_weights,
                              .pins_host_memory = !device.is_host,
                              .holds_blocks = device.holds_blocks,
                              .attends_on_host = device.attends_on_host};
    // A device that is host memory takes its buffers from the blocks' share.
    for (int round = 0; round < (device.is_host ? 2 : 1); ++round) {
      made.host =
          allocate_host(policy_, shape, dtype, demand_, problem_.batch, budget, memory, fixed);
      made.overhead = memory.overhead;
      if (!device.is_host) {
        made.overhead += page_tables_of(budget.pool.value_or(pool_of(made.host)));
      }
      const Placement placement =
          device.holds_blocks
              ? place_blocks(shape, dtype, demand_, made.host, problem_.batch, made.overhead,
                             device.cap, fixed)
              : Placement{made.host,
                          choose_device_limits(shape, dtype, demand_, made.host, problem_.batch,
                                               made.overhead, device.cap)};
      made.host = placement.host;
      made.device = placement.device;
      budget.device_in_host = device_memory(shape, dtype, made.device, Bytes{0});
    }
    return made;
  }

  // The same with this number of layers' weights on the device only; nothing if fewer would then have
  // room there.
  std::optional<MemoryPlan> without_copies(BlockBudget budget, std::int32_t layers) const {
    const Bytes copies = layer_bytes() * layers;
    budget.weights = budget.weights - copies;
    budget.available = budget.available + copies;
    MemoryPlan made = with(budget);
    if (made.device.resident_layers < layers) {
      return std::nullopt;
    }
    made.released_layers = made.device.resident_layers;  // the same layers, not only as many
    return made;
  }

  Bytes pool_of(const Allocation& blocks) const {
    const BlockSizes sizes = block_sizes(problem_.shape, problem_.dtype, problem_.batch.kv_format);
    const std::uint64_t region = region_bytes(sizes, blocks);
    return Bytes{static_cast<std::int64_t>(region) * problem_.shape.num_hidden_layers};
  }
  Bytes layer_bytes() const { return weight_layout(problem_.shape, problem_.dtype).layer.bytes; }

 private:
  const Policy& policy_;
  const PlanningProblem& problem_;
  const Demand& demand_;
};

}  // namespace

MemoryPlan plan_memory(const Policy& policy, const PlanningProblem& problem, const Demand& demand) {
  const MemoryPlanner planner(policy, problem, demand);
  const BlockBudget& budget = problem.budget;
  MemoryPlan whole = planner.with(budget);
  if (problem.fixed.placement.resident_layers || budget.pool || !problem.device.holds_blocks) {
    return whole;
  }
  // If the host cannot hold all blocks, a policy that places blocks itself also tries this: it may have put
  // blocks on the device that are better on the host, with more layers on the device.
  if (whole.host.placed) {
    if (planner.pool_of(off_device(whole.host)).n <
        static_cast<std::int64_t>(kFull * static_cast<double>(bytes_for_blocks(budget).n))) {
      return whole;
    }
    BlockBudget without_copies = budget;
    without_copies.layer_copy = planner.layer_bytes();
    MemoryPlan made = planner.with(without_copies);
    made.released_layers =
        planner.pool_of(made.host) > bytes_for_blocks(budget) ? made.device.resident_layers : 0;
    return made;
  }
  if (blocks_of(whole.host) >= demand.most_blocks) {
    return whole;
  }
  // More blocks may leave less room on the device, and so for fewer layers.
  std::int32_t layers = whole.device.resident_layers;
  for (int tries = 0; layers > 0 && tries < kMaxTries; ++tries) {
    if (const auto more = planner.without_copies(budget, layers)) {
      return blocks_of(more->host) > blocks_of(whole.host) ? *more : whole;
    }
    layers = layers * 7 / 8;
  }
  return whole;
}

}  // namespace poise
