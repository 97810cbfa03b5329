// What the pipeline tells of orders that the device has finished.

#include <algorithm>
#include <utility>

#include "common/trouble.h"
#include "gpu_executor/pipeline.h"

namespace poise {

std::optional<OrderDone> Pipeline::poll(Seconds timeout) {
  const bool one = !running_.empty() && ended(running_.front(), timeout);
  if (const auto sentence = device_.failure()) {
    fail(Exit::interrupted, "the device {} failed: {}", device_.name(), *sentence);
  }
  if (!one) {
    return std::nullopt;
  }
  Running order = std::move(running_.front());
  running_.pop_front();
  return report(std::move(order));
}

bool Pipeline::ended(const Running& order, Seconds timeout) {
  return std::ranges::all_of(order.ends,
                             [&](const auto& end) { return device_.reached(*end, timeout); });
}

// REQUIRES: the order before is the last one reported.
std::int64_t Pipeline::rest_before(const Running& order) {
  if (!order.begin || !any_reported_) {
    return 0;
  }
  std::int64_t done = 0;
  for (const auto& end : reported_) {
    done = std::max(done, device_.time_of(*end));
  }
  return std::max<std::int64_t>(0, device_.time_of(*order.begin) - done);
}

OrderDone Pipeline::report(Running order) {
  OrderDone done;
  const auto number = [](std::int64_t n) { return static_cast<std::uint64_t>(n); };
  done.layer.rested_ns = number(rest_before(order));
  if (order.begin) {
    spare_events_.push_back(std::move(order.begin));
  }
  any_reported_ = true;
  const auto compute = static_cast<std::size_t>(Stream::compute);
  StreamTotals batch_began = device_.totals(*reported_[compute]), before = batch_began;
  std::array<std::int64_t, 3> waits{};  // by WaitsFor
  std::size_t batches = 0;
  for (Point& point : order.points) {  // as they were recorded
    const StreamTotals now = device_.totals(*point.event);
    waits[static_cast<std::size_t>(point.waits)] += now.wait_ns - before.wait_ns;
    before = now;
    if (point.ends_mini_batch) {
      const std::uint32_t id = order.mini_batches[batches++];
      const MiniBatchWork& batch = order.work->mini_batches[id];
      const bool layer = layer_of(order.stage).has_value();
      done.layer.mini_batches.emplace_back(
          id, layer ? batch.kv_blocks : 0, layer ? batch.act_blocks : 0,
          static_cast<std::uint32_t>(batch.rows), number(now.busy_ns - batch_began.busy_ns));
      batch_began = now;
    }
    spare_events_.push_back(std::move(point.event));
  }
  done.layer.waits = std::make_unique<messages::ComputeWaits>(number(waits[0]), number(waits[1]),
                                                              number(waits[2]));

  std::array<std::unique_ptr<messages::StreamReport>, kStreams> streams;
  for (std::size_t i = 0; i < kStreams; ++i) {
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
  done.layer.link = std::make_unique<messages::LinkBytes>(
      number(order.weights.n), number(order.kv.n), number(order.act.n), number(order.stores.n));
  done.layer.spans = tracer_.spans(std::move(order.trace));

  if (order.stage > 0 && !layer_of(order.stage)) {
    done.iteration = results_of(*order.work);
    host_buffers_.give_back(std::move(order.work->tables));
    host_buffers_.give_back(std::move(order.work->results));
  }
  return done;
}

}  // namespace poise
