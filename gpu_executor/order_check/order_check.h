#pragma once
// Trusts no order. Every number of an Iteration, a LayerOrder or a Configure is compared with the
// model, the pool in the control segment and the configured buffers before any memory is touched. A
// wrong number fails with a sentence (the executor turns it into Rejected) and leaves the state
// unchanged. Besides ranges, the check proves that every row of a slot that is read was loaded or
// made before, that no row is written twice, that stages come in order, and that a layer's weights are
// there when it is computed. Messages must have passed the FlatBuffers verifier. Only the messages'
// own memory is touched here, and no device.

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "common/blocks.h"
#include "common/device_memory.h"
#include "common/messages_generated.h"
#include "common/model_shape.h"
#include "common/weight_layout.h"
#include "gpu_executor/layer_ledger.h"

namespace poise {

// The limits a Configure asks for; fails where they are not limits.
DeviceLimits limits_of(const messages::Configure& configure);

// The block pool at the time of an order.
struct PoolNow {
  std::uint64_t epoch = 0;  // 0: no pool
  PoolPartition partition{};
  KvFormat kv_format = KvFormat::plain;
};

// Fails where the pool in the control segment does not fit the segment that holds the blocks.
void check_pool(const PoolPartition& pool, const BlockSizes& sizes, std::int32_t layers,
                Bytes segment);

// For each mini-batch, those whose stores its loads read.
using StoreDependencies = std::vector<std::vector<std::uint32_t>>;

// The tables of one mini-batch by themselves (order_check_rows.cpp).
void check_mini_batch(const messages::MiniBatch& batch, const ModelShape& shape,
                      const DeviceLimits& limits, const PoolPartition& pool);
// Stores and loads of all mini-batches together (block_hazards.cpp).
StoreDependencies check_block_hazards(const messages::Iteration& iteration);

// Whether host cores attend a mini-batch's sequences. REQUIRES: it has an entry; where it was checked,
// that stands for all of them.
inline bool is_on_host(const messages::MiniBatch& batch) {
  return batch.entries()->Get(0)->where() == messages::Where::HostInPlace;
}

class OrderCheck {
 public:
  OrderCheck(const ModelShape& shape, const WeightLayout& layout, const DeviceLimits& limits,
             std::uint32_t credits);

  // Each returns only where the order may be run, and then counts it as accepted.
  StoreDependencies accept(const messages::Iteration& iteration, const PoolNow& pool);
  void accept(const messages::LayerOrder& order);
  // An order that was accepted is done; makes room for another.
  void done() { --running_; }
  // No more orders come for the iterations that were begun: another planner has taken over, or one of
  // their orders was refused.
  void abandon();
  const DeviceLimits& limits() const { return limits_; }
  // No iteration is half-way: buffers may be changed.
  bool between_iterations() const { return begun_.empty(); }

 private:
  struct Begun {
    std::uint32_t mini_batches;
    StoreDependencies after;
    std::uint32_t next_stage = 0;
    std::vector<bool> on_host = {};  // by mini-batch: host cores attend it
  };

  void check_mini_batches(const messages::LayerOrder& order, const Begun& begun) const;
  LayerLedger check_weights(const messages::LayerOrder& order) const;

  const ModelShape shape_;
  const DeviceLimits limits_;
  const std::uint32_t credits_;
  LayerLedger ledger_;
  std::map<std::uint64_t, Begun> begun_;  // by iteration; their last order has not come
  std::uint64_t last_iteration_ = 0;
  bool any_iteration_ = false;
  std::uint32_t running_ = 0;
};

}  // namespace poise
