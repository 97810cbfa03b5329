#pragma once
// A mini-batch's blocks and tables into the device's buffers, and its new rows out of them, layer by
// layer. What a mini-batch brings into a layer lies in one of two or three sides, so that the next ones load
// while this one computes; a group's new rows lie in one of two sides of their own. Holds all of those,
// the blocks that stay on the device, and the events between the copies and what computes:
//   - a load into a side waits for the computation that last read that side;
//   - a load of a layer's rows waits for all their stores by earlier orders, and where it reads rows
//     that this iteration stores (a long prompt in parts), for those;
//   - a store waits for the launch that made its rows.
//
// ACT blocks that stay on the device are copied into and out of the sides by copy_out, which has time
// to spare and, being in order, sees its own stores; the link does not wait for them. KV blocks there
// are read and written where they lie, by compute alone: their slots stay empty.
// Belongs to the pipeline, and is used by its thread alone.

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "common/device_memory.h"
#include "common/model_shape.h"
#include "common/windows/unseen_blocks.h"
#include "gpu_executor/device.h"
#include "gpu_executor/running_orders.h"
#include "gpu_executor/tracer.h"
#include "gpu_executor/work.h"

namespace poise {

// What a mini-batch brings into a layer.
struct BatchSide {
  Buffer act, kv, tables;
  std::unique_ptr<Event> act_loaded;   // copy_in: ACT blocks have arrived, where KV blocks follow
  std::unique_ptr<Event> loaded;       // copy_in: all blocks and tables have
  std::unique_ptr<Event> loaded_here;  // copy_out: ACT blocks of the device have
  std::unique_ptr<Event> computed;     // compute: nothing reads the side any more
};

// Half of the double buffer for a group's new rows of ACT, keys and values.
struct RowsSide {
  Buffer act, kv;
  std::unique_ptr<Event> made;    // compute: the rows are there
  std::unique_ptr<Event> stored;  // copy_out: they have left
};

// A mini-batch in a layer.
struct Visit {
  std::uint32_t id;
  MiniBatchWork& batch;
  BatchSide* side;             // null: attended on host cores, nothing is loaded
  std::int64_t first_row = 0;  // within its group
  const Event* act_there =
      nullptr;  // once loads are queued: its ACT blocks of the host have arrived
};

class BlockCopies {
 public:
  // `kept`: blocks on the device that stay valid; nothing: there are none yet.
  BlockCopies(Device& device, const ModelShape& shape, DType dtype, const DeviceLimits& limits,
              Tracer& tracer, std::shared_ptr<Buffer> kept);

  // Sides are taken in turn.
  BatchSide& next_side() { return sides_[visits_++ % sides_.size()]; }
  RowsSide& next_rows_side() { return rows_sides_[groups_++ % rows_sides_.size()]; }

  // Each queues its copies, and adds what crosses the link to `link`. ACT blocks go before KV blocks,
  // so that KV Gen runs while these cross. A layer with a window loads what is seen there alone. `first`:
  // of the order's mini-batches.
  void load(const IterationWork& work, Visit& visit, LayerId layer, bool first, LinkTraffic& link);
  // The new rows of a group.
  void store(const IterationWork& work, std::span<const Visit> visits, const RowsSide& side,
             LayerId layer, LinkTraffic& link);

  // The layer's KV blocks that stay on the device, the last one first; null where there are none.
  std::byte* kv_here(LayerId layer) const;
  // The blocks on the device, for another owner beside this one.
  const std::shared_ptr<Buffer>& blocks() const { return context_blocks_; }

 private:
  void load_host(const Visit& visit, std::span<const Copy> copies);
  void load_here(const IterationWork& work, const Visit& visit, LayerId layer);
  bool loads(const BlockLoad& run, LayerId layer) const;
  void add_run(const HostBlocks& blocks, const BlockLoad& run, const BatchSide& side, LayerId layer,
               std::vector<Copy>& copies) const;
  std::byte* block_at(const HostBlocks& blocks, messages::Place place, BlockKind kind,
                      LayerId layer, std::uint32_t block) const;

  Device& device_;
  Tracer& tracer_;
  const DeviceLimits limits_;
  const BlockSizes sizes_;
  const LayerWindows windows_;
  std::shared_ptr<Buffer> context_blocks_;
  const PoolPartition pool_here_;  // within context_blocks_
  std::vector<BatchSide> sides_;
  std::array<RowsSide, 2> rows_sides_;
  std::uint64_t visits_ = 0, groups_ = 0;
  std::vector<std::unique_ptr<Event>> stored_;  // copy_out, by layer: its last stores
};

}  // namespace poise
