#pragma once
// Runs layer orders on a device so that copies in, computation and copies out overlap:
//
//   copy in   | tables, ACT, KV of mb 0 | W pieces | ACT, KV of mb 1 | …     never idle
//   compute   | QKV of all rows | KV Gen, attention of mb 0 | … of mb 1 | … | projection, MLP
//   copy out  |       new K/V/ACT rows of all | …
//
// Everything that a mini-batch brings into a layer lies in one of two sides (KV, ACT, tables), so
// that the next one loads while this one computes; the next layer's first mini-batch follows the
// last of this one, also over head and embedding to the next iteration, so nothing drains. What is
// computed row by row runs once for a group: neighbouring mini-batches whose rows the buffers hold;
// a group's new rows lie in one of two sides of their own. What must wait for what:
//   - a load into a side, for the computation that last read that side (an iteration's own tables
//     have two sides, too);
//   - a load of a layer's rows, for all their stores by earlier orders, and where rows of the same
//     iteration are read (a long prompt in pieces), for the stores of that mini-batch;
//   - computation, for its loads, its weights' pieces, and for the stores of the rows it overwrites;
//   - a store, for the launch that made its rows.
//
// ACT blocks that stay on the device are moved into and out of the sides by copy_out, which has time
// and, in order, sees its own stores; the link never waits for them. KV blocks there are read and
// written where they lie, by compute alone: their slots stay empty.
// `submit` only queues; `poll` tells what is finished. Orders come checked (order_check.h), in the
// order they are to run. Owns all device memory of one Configure, exactly as planned.

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "common/messages_generated.h"
#include "gpu_executor/decoder.h"
#include "gpu_executor/device.h"
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

// What is told of a finished order; of the last of an iteration also its results.
struct OrderDone {
  messages::LayerDoneT layer;
  std::optional<messages::IterationDoneT> iteration;
};

class Pipeline {
 public:
  // Fails, with the plan's numbers, where the buffers are more than `cap`. `trace`: reports hold
  // spans. `resident`: as many layers as `limits` name; nothing: they are uploaded now. `kept`: the
  // blocks on the device of the pipeline before, which stay valid where there are as many now.
  Pipeline(Device& device, const Model& model, const DeviceLimits& limits, Bytes cap,
           bool trace = false, std::shared_ptr<const ResidentWeights> resident = nullptr,
           Buffer kept = {});
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
  std::optional<OrderDone> poll(Seconds timeout = {0});
  bool idle() const { return running_.empty(); }
  // The blocks on the device, for the pipeline after this one. REQUIRES: idle(); the end of this one
  // comes next.
  Buffer leave_blocks() { return std::move(context_blocks_); }
  // Waits for all that is queued; their reports still come from `poll`.
  void finish() { device_.finish(); }

  Bytes device_bytes() const { return device_.in_use(); }

 private:
  // Half of every double buffer.
  struct Side {
    Buffer act, kv, tables, sampled;
    std::unique_ptr<Event> loaded;                       // copy_in: blocks and tables are there
    std::unique_ptr<Event> loaded_here;                  // copy_out: blocks of the device, too
    std::unique_ptr<Event> computed;                     // compute: nothing reads the side any more
    std::unique_ptr<Event> sampled_made, sampled_taken;  // compute, copy_out: results
  };
  // Half of the double buffer for new rows of ACT, keys and values.
  struct RowsSide {
    Buffer act, kv;
    std::unique_ptr<Event> made;    // compute: new rows stand
    std::unique_ptr<Event> stored;  // copy_out: they have left
  };
  // Half of the tables for embedding and head; an iteration holds one.
  struct IterationSide {
    Buffer tables;
    std::unique_ptr<Event> loaded;    // copy_in
    std::unique_ptr<Event> computed;  // compute: as in Side
  };
  // A point of the compute stream within an order, and what it waited for since the one before.
  enum class WaitsFor : std::uint8_t { weights, blocks, rows };
  struct Point {
    std::unique_ptr<Event> event;
    WaitsFor waits;
    bool ends_mini_batch;
  };
  // An order that was queued.
  struct Running {
    std::uint64_t seq = 0;
    std::uint32_t stage = 0;
    std::vector<std::uint32_t> mini_batches;
    std::shared_ptr<IterationWork> work;
    Bytes weights{}, kv{}, act{}, stores{};  // that cross the link
    std::unique_ptr<Event> begin;            // on copy_in, of an iteration's first order
    std::array<std::unique_ptr<Event>, kStreams> ends;
    std::vector<Point> points;
    OrderTrace trace;
  };
  struct Visit {  // a mini-batch in a layer
    std::uint32_t id;
    MiniBatchWork& batch;
    Side& side;
    std::int64_t first_row = 0;  // within its group
  };
  // Mini-batches one behind the other whose rows lie side by side: projections and MLP run for all
  // of them at once. Bits do not depend on it (README section 8).
  struct Group {
    std::size_t first, end;  // visits
    std::int32_t rows;
  };

  void run_layer(Running& order, const LayerOrderWork& work, LayerId layer);
  void load(Running& order, const Visit& visit, LayerId layer, bool first);
  void load_here(const Running& order, const Visit& visit, LayerId layer);
  void add_run(const HostBlocks& blocks, const BlockLoad& run, const Side& side, LayerId layer,
               std::vector<Copy>& copies) const;
  std::byte* block_at(const HostBlocks& blocks, messages::Place place, BlockKind kind,
                      LayerId layer, std::uint32_t block) const;
  std::byte* kv_here(LayerId layer) const;
  void fetch_after(Running& order, const LayerOrderWork& work, std::uint32_t mini_batch);
  std::vector<Group> groups_of(std::span<Visit> visits) const;
  LayerRows rows_of(const Visit& first, const Group& group, const RowsSide& side) const;
  LayerHooks hooks(std::uint32_t mini_batch, const RowsSide& side);
  void attend(const Visit& visit, LayerId layer_id, const LayerWeights& weights,
              const LayerRows& rows, const RowsSide& side);
  void store(Running& order, std::span<const Visit> visits, const RowsSide& side, LayerId layer);
  void run_embedding(Running& order, const LayerOrderWork& work);
  void run_head(Running& order, const LayerOrderWork& work);
  void compute_head(const IterationWork& work, const HeadChunk& chunk, Side& side,
                    const std::byte* table, std::int64_t first_result);
  void mark(Running& order, WaitsFor waits, bool ends_mini_batch);
  std::optional<LayerId> layer_of(std::uint32_t stage) const;
  float* hidden_of(const MiniBatchWork& batch) const;
  std::unique_ptr<Event> take_event();
  bool ended(const Running& order, Seconds timeout);
  OrderDone report(Running order);
  std::int64_t rest_before(const Running& order);

  Device& device_;
  const Model model_;
  const DeviceLimits limits_;
  const BlockSizes sizes_;
  WeightsOnDevice weights_;
  Decoder decoder_;
  Tracer tracer_;
  Buffer hidden_, regenerated_, context_blocks_;
  const PoolPartition pool_here_;  // within context_blocks_
  std::array<Side, 2> sides_;
  std::array<RowsSide, 2> rows_sides_;
  std::array<IterationSide, 2> iteration_sides_;
  std::uint64_t visits_ = 0, groups_ = 0, iterations_ = 0;  // sides are taken in turn
  std::vector<std::unique_ptr<Event>> stored_;              // copy_out, by layer: its last stores

  HostBuffers host_buffers_;
  std::map<std::uint64_t, std::shared_ptr<IterationWork>> begun_;  // their last order has not come
  std::deque<Running> running_;
  std::vector<std::unique_ptr<Event>> spare_events_;
  std::array<std::unique_ptr<Event>, kStreams> reported_;  // ends of the last order reported
  bool any_reported_ = false;
};

}  // namespace poise
