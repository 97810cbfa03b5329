#pragma once
// The orders that were queued and are not yet reported, oldest first: the events at which they end on
// each stream, the points of the compute stream at which their times are read, and the report made of
// them. Belongs to the pipeline, and is used by its thread alone.

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "common/messages_generated.h"
#include "common/model_shape.h"
#include "gpu_executor/device.h"
#include "gpu_executor/tracer.h"
#include "gpu_executor/work.h"

namespace poise {

// The report of a finished order; that of an iteration's last order also holds its results.
struct OrderDone {
  messages::LayerDoneT layer;
  std::optional<messages::IterationDoneT> iteration;
};

// What an order moved over the link.
struct LinkTraffic {
  Bytes weights{}, kv{}, act{}, stores{};
};

// A point of the compute stream within an order, and what the stream waited for since the last one.
enum class WaitsFor : std::uint8_t { weights, blocks, rows, host };
struct OrderPoint {
  std::unique_ptr<Event> event;
  WaitsFor waits;
  bool ends_mini_batch;
};

// An order that was queued.
struct RunningOrder {
  std::uint64_t seq = 0;
  std::uint32_t stage = 0;
  std::vector<std::uint32_t> mini_batches;
  std::shared_ptr<IterationWork> work;
  LinkTraffic link;
  Bytes host_rows{};             // attention's output from host cores
  std::unique_ptr<Event> begin;  // on copy_in, of an iteration's first order
  std::array<std::unique_ptr<Event>, kStreams> ends;
  std::vector<OrderPoint> points;
  OrderTrace trace;
};

class RunningOrders {
 public:
  // The first report counts from here on. `streams`: those that orders use, in order.
  RunningOrders(Device& device, Tracer& tracer, HostBuffers& host_buffers, const ModelShape& shape,
                std::span<const Stream> streams);

  // Queues the event at which an iteration begins.
  void begin(RunningOrder& order);
  // Queues a point of the compute stream. Every mini-batch of the order ends at one, in their order.
  void mark(RunningOrder& order, WaitsFor waits, bool ends_mini_batch);
  // All of the order is queued.
  void add(RunningOrder order);

  bool empty() const { return running_.empty(); }
  // The report of the oldest order once it has ended, waiting at most `timeout` for that.
  std::optional<OrderDone> poll(Seconds timeout);

  // The decoder layer that a stage computes; nothing: embedding or head.
  std::optional<LayerId> layer_of(std::uint32_t stage) const;

 private:
  std::unique_ptr<Event> take_event();
  bool ended(const RunningOrder& order, Seconds timeout);
  OrderDone report(RunningOrder order);
  std::int64_t rest_before(const RunningOrder& order);
  void report_compute(RunningOrder& order, messages::LayerDoneT& done);

  Device& device_;
  Tracer& tracer_;
  HostBuffers& host_buffers_;
  const ModelShape shape_;
  const std::span<const Stream> streams_;
  std::deque<RunningOrder> running_;
  std::vector<std::unique_ptr<Event>> spare_events_;
  std::array<std::unique_ptr<Event>, kStreams> reported_;  // ends of the last order reported
  bool any_reported_ = false;
};

}  // namespace poise
