#include "gpu_executor/running_orders.h"

#include <algorithm>
#include <utility>

#include "common/trouble.h"

namespace poise {
namespace {

std::uint64_t number(std::int64_t n) { return static_cast<std::uint64_t>(n); }

}  // namespace

RunningOrders::RunningOrders(Device& device, Tracer& tracer, HostBuffers& host_buffers,
                             const ModelShape& shape, std::span<const Stream> streams)
    : device_(device),
      tracer_(tracer),
      host_buffers_(host_buffers),
      shape_(shape),
      streams_(streams) {
  for (const Stream stream : streams_) {
    reported_[static_cast<std::size_t>(stream)] = device.make_event();
    device.record(*reported_[static_cast<std::size_t>(stream)], stream);
  }
}

void RunningOrders::begin(RunningOrder& order) {
  order.begin = take_event();
  device_.record(*order.begin, Stream::copy_in);
}

void RunningOrders::mark(RunningOrder& order, WaitsFor waits, bool ends_mini_batch) {
  order.points.push_back({take_event(), waits, ends_mini_batch});
  device_.record(*order.points.back().event, Stream::compute);
}

void RunningOrders::add(RunningOrder order) {
  for (const Stream stream : streams_) {
    auto& end = order.ends[static_cast<std::size_t>(stream)] = take_event();
    device_.record(*end, stream);
  }
  order.trace = tracer_.take();
  running_.push_back(std::move(order));
}

std::optional<OrderDone> RunningOrders::poll(Seconds timeout) {
  const bool one = !running_.empty() && ended(running_.front(), timeout);
  if (const auto sentence = device_.failure()) {
    fail(Exit::device_failed, "the device {} failed: {}", device_.name(), *sentence);
  }
  if (!one) {
    return std::nullopt;
  }
  RunningOrder order = std::move(running_.front());
  running_.pop_front();
  return report(std::move(order));
}

std::optional<LayerId> RunningOrders::layer_of(std::uint32_t stage) const {
  if (stage == 0 || stage > static_cast<std::uint32_t>(shape_.num_hidden_layers)) {
    return std::nullopt;
  }
  return LayerId{stage - 1};
}

std::unique_ptr<Event> RunningOrders::take_event() {
  if (spare_events_.empty()) {
    return device_.make_event();
  }
  auto event = std::move(spare_events_.back());
  spare_events_.pop_back();
  return event;
}

bool RunningOrders::ended(const RunningOrder& order, Seconds timeout) {
  return std::ranges::all_of(streams_, [&](Stream stream) {
    return device_.reached(*order.ends[static_cast<std::size_t>(stream)], timeout);
  });
}

// REQUIRES: the order before is the last one reported.
std::int64_t RunningOrders::rest_before(const RunningOrder& order) {
  if (!order.begin || !any_reported_) {
    return 0;
  }
  std::int64_t done = 0;
  for (const Stream stream : streams_) {
    done = std::max(done, device_.time_of(*reported_[static_cast<std::size_t>(stream)]));
  }
  return std::max<std::int64_t>(0, device_.time_of(*order.begin) - done);
}

OrderDone RunningOrders::report(RunningOrder order) {
  OrderDone done;
  done.layer.rested_ns = number(rest_before(order));
  if (order.begin) {
    spare_events_.push_back(std::move(order.begin));
  }
  any_reported_ = true;
  report_compute(order, done.layer);

  std::array<std::unique_ptr<messages::StreamReport>, kStreams> streams;
  for (std::size_t i = 0; i < streams_.size(); ++i) {
    const StreamTotals from = device_.totals(*reported_[i]);
    const StreamTotals to = device_.totals(*order.ends[i]);
    streams[i] = std::make_unique<messages::StreamReport>(number(to.bytes - from.bytes),
                                                          number(to.busy_ns - from.busy_ns),
                                                          number(to.wait_ns - from.wait_ns));
    spare_events_.push_back(std::exchange(reported_[i], std::move(order.ends[i])));
  }
  done.layer.iteration = order.work->iteration;
  done.layer.stage = order.stage;
  done.layer.order = order.seq;
  done.layer.copy_in = std::move(streams[0]);
  done.layer.compute = std::move(streams[1]);
  done.layer.copy_out = std::move(streams[2]);
  done.layer.host = std::move(streams[3]);
  done.layer.host_rows_bytes = number(order.host_rows.n);
  done.layer.link =
      std::make_unique<messages::LinkBytes>(number(order.link.weights.n), number(order.link.kv.n),
                                            number(order.link.act.n), number(order.link.stores.n));
  done.layer.spans = tracer_.spans(std::move(order.trace));

  if (order.stage > 0 && !layer_of(order.stage)) {
    done.iteration = results_of(*order.work);
    host_buffers_.give_back(std::move(order.work->tables));
    host_buffers_.give_back(std::move(order.work->results));
  }
  return done;
}

// The times of each mini-batch and what computation waited for, from point to point.
void RunningOrders::report_compute(RunningOrder& order, messages::LayerDoneT& done) {
  const auto compute = static_cast<std::size_t>(Stream::compute);
  StreamTotals batch_began = device_.totals(*reported_[compute]), before = batch_began;
  std::array<std::int64_t, 4> waits{};  // by WaitsFor
  std::size_t batches = 0;
  for (OrderPoint& point : order.points) {  // as they were recorded
    const StreamTotals now = device_.totals(*point.event);
    waits[static_cast<std::size_t>(point.waits)] += now.wait_ns - before.wait_ns;
    before = now;
    if (point.ends_mini_batch) {
      const std::uint32_t id = order.mini_batches[batches++];
      const MiniBatchWork& batch = order.work->mini_batches[id];
      const auto layer = layer_of(order.stage);
      const BroughtBlocks& brought = batch.brought_into(layer && shape_.window(*layer) > 0);
      done.mini_batches.emplace_back(id, layer ? brought.kv : 0, layer ? brought.act : 0,
                                     static_cast<std::uint32_t>(batch.rows),
                                     number(now.busy_ns - batch_began.busy_ns));
      batch_began = now;
    }
    spare_events_.push_back(std::move(point.event));
  }
  done.waits = std::make_unique<messages::ComputeWaits>(number(waits[0]), number(waits[1]),
                                                        number(waits[2]));
  done.host_wait_ns = number(waits[3]);
}

}  // namespace poise
