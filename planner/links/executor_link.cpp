#include "planner/links/executor_link.h"

#include <unistd.h>

#include <numeric>

#include "common/testing/failpoint.h"
#include "common/trouble.h"
#include "planner/links/clock.h"

namespace poise {
namespace {

constexpr Seconds kFarewell{2};
constexpr useconds_t kFarewellStep = 5000;

Bytes bytes_of(std::uint64_t number) {
  return {static_cast<std::int64_t>(std::min<std::uint64_t>(number, INT64_MAX))};
}

DeviceKind kind_of(const messages::Hello& hello) {
  switch (hello.device_kind()) {
    case messages::DeviceKind::Cpu:
      return DeviceKind::cpu;
    case messages::DeviceKind::Cuda:
      return DeviceKind::cuda;
    default:
      fail(Exit::foreign, "the gpu_executor does not name the kind of its device '{}'",
           hello.device() != nullptr ? hello.device()->string_view() : "");
  }
}

}  // namespace

ExecutorLink::ExecutorLink(std::unique_ptr<Channel> channel, OrderLog& log, std::int32_t layers,
                           const BlockSizes& sizes)
    : channel_(std::move(channel)),
      log_(&log),
      last_stage_(static_cast<std::uint32_t>(layers) + 1),
      balance_(sizes) {}

bool ExecutorLink::step(Seconds timeout) {
  bool passed = send_orders();
  auto message = channel_->receive(passed ? Seconds{0} : timeout);
  while (message) {
    passed = true;
    const Stopwatch stopwatch(message_time_);
    take(std::move(*message));
    message = channel_->receive(Seconds{0});
  }
  return send_orders() || passed;
}

void ExecutorLink::configure(const DeviceLimits& limits, Bytes gpu_memory,
                             const WeightLayout& layout, bool trace) {
  check(greeting_.has_value() && !busy(), "an executor is configured between iterations");
  messages::ConfigureT configure;
  configure.gpu_memory = static_cast<std::uint64_t>(gpu_memory.n);
  configure.resident_layers = limits.resident_layers;
  configure.max_rows = limits.max_rows;
  configure.max_mini_batch_rows = limits.max_mini_batch_rows;
  configure.max_sequences = limits.max_sequences;
  configure.act_slots = limits.act_slots;
  configure.kv_slots = limits.kv_slots;
  configure.logits_rows = limits.logits_rows;
  configure.max_context = limits.max_context;
  configure.gpu_act_blocks = limits.gpu_act_blocks;
  configure.gpu_kv_blocks = limits.gpu_kv_blocks;
  configure.kv_format = static_cast<messages::KvFormat>(limits.kv_format);
  configure.logit_edits = limits.logit_edits;
  configure.sides = limits.sides;
  configure.trace = trace;
  configure.host_attention = limits.host_attention;
  configure.absorption = limits.absorption;
  weights_.emplace(layout, limits);
  this->configure(std::move(configure));
}

void ExecutorLink::configure(messages::ConfigureT configure) {
  configure.log_began_ns = log_->began_ns();
  credits_ = 0;
  configured_ = true;
  returned_ = false;
  results_.reset();
  send_logged(std::move(configure));
}

void ExecutorLink::begin(messages::IterationT tables, bool last, LinkIdle idle) {
  check(ready() && !busy() && !results_, "one iteration is under way at a time");
  const Stopwatch stopwatch(message_time_);
  iteration_ =
      RunningIteration{.number = tables.iteration,
                       .mini_batches = static_cast<std::uint32_t>(tables.mini_batches.size()),
                       .last = last,
                       .idle = std::move(idle)};
  balance_.begin(kind_of(tables), monotonic_now());
  send_logged(std::move(tables));
}

void ExecutorLink::begin(messages::IterationT tables, std::vector<messages::LayerOrderT> orders) {
  check(orders.size() == last_stage_ + 1, "an iteration has an order for each stage");
  begin(std::move(tables), false);
  iteration_->recorded = std::move(orders);
}

messages::LayerOrderT ExecutorLink::next_order() {
  const std::uint32_t stage = iteration_->next_stage++;
  if (!iteration_->recorded.empty()) {
    return std::move(iteration_->recorded[stage]);
  }
  messages::LayerOrderT order;
  order.iteration = iteration_->number;
  order.stage = stage;
  order.mini_batches.resize(iteration_->mini_batches);
  std::iota(order.mini_batches.begin(), order.mini_batches.end(), 0);
  order.fetch =
      weights_->next(stage, iteration_->mini_batches, iteration_->last, iteration_->idle);
  return order;
}

bool ExecutorLink::send_orders() {
  if (!iteration_) {
    return false;
  }
  bool sent = false;
  while (!gone_ && iteration_->next_stage <= last_stage_ && iteration_->undone < credits_) {
    const Stopwatch stopwatch(message_time_);
    ++iteration_->undone;
    send_logged(next_order());
    sent = true;
  }
  return sent;
}

template <typename Table>
void ExecutorLink::send_logged(Table&& table) {
  failpoint("planner.order_made");
  gone_ = gone_ || !send(*channel_, std::forward<Table>(table), &sent_);
  if (!gone_) {
    failpoint("planner.order_sent");
    log_->append(sent_);
  }
}

void ExecutorLink::take(Received message) {
  switch (message->body_type()) {
    case messages::Body::Hello:
      take(*message->body_as_Hello(), message->executor_epoch());
      break;
    case messages::Body::Ack:
      break;  // credits come back with LayerDone
    case messages::Body::Ready:
      credits_ = message->body_as_Ready()->credits();
      link_bytes_per_s_ = message->body_as_Ready()->link_bytes_per_s();
      if (credits_ == 0) {
        fail(Exit::interrupted, "the gpu_executor is ready but takes no orders");
      }
      log_->append(message.bytes());
      break;
    case messages::Body::LayerDone:
      log_->append(message.bytes());
      take(*message->body_as_LayerDone());
      break;
    case messages::Body::IterationDone: {
      log_->append(message.bytes());
      const std::uint64_t number = message->body_as_IterationDone()->iteration();
      if (!iteration_ || iteration_->number != number || iteration_->next_stage <= last_stage_ ||
          iteration_->undone > 0) {
        fail(Exit::interrupted, "the gpu_executor says iteration {} is done, which is not so",
             number);
      }
      iteration_.reset();
      balance_.end(monotonic_now());
      results_ = std::move(message);
      break;
    }
    case messages::Body::Rejected: {
      log_->append(message.bytes());
      const auto* rejected = message->body_as_Rejected();
      const std::string sentence =
          rejected->sentence() != nullptr ? rejected->sentence()->str() : "it gives no reason";
      if (!ready()) {  // Configure: the device is not what was thought
        fail("the gpu_executor cannot be set up: {}", sentence);
      }
      fail(Exit::internal, "the gpu_executor refuses order {}: {}", rejected->order(), sentence);
    }
    case messages::Body::Stop: {
      const auto* reason = message->body_as_Stop()->reason();
      fail(Exit::interrupted, "the gpu_executor ends: {}",
           reason != nullptr ? reason->str() : "it gave no reason");
    }
    default:
      fail(Exit::foreign, "the gpu_executor sent a message of type {}",
           messages::EnumNameBody(message->body_type()));
  }
}

void ExecutorLink::take(const messages::Hello& hello, std::uint32_t epoch) {
  returned_ = configured_;
  gone_ = false;
  credits_ = 0;
  iteration_.reset();
  greeting_ = Greeting{.pid = static_cast<std::int32_t>(hello.pid()),
                       .device = hello.device() != nullptr ? hello.device()->str() : "",
                       .kind = kind_of(hello),
                       .memory = bytes_of(hello.device_memory()),
                       .overhead = bytes_of(hello.device_overhead()),
                       .resident_layers = hello.resident_layers(),
                       .epoch = epoch,
                       .after_death = hello.after_death(),
                       .host_threads = hello.host_threads()};
  channel_->set_epochs({.planner = channel_->epochs().planner, .executor = epoch});
}

void ExecutorLink::take(const messages::LayerDone& done) {
  if (!iteration_ || done.iteration() != iteration_->number || iteration_->undone == 0) {
    fail(Exit::interrupted,
         "the gpu_executor did an order that was not sent (iteration {}, stage {})",
         done.iteration(), done.stage());
  }
  --iteration_->undone;
  if (watcher_) {
    watcher_(done);
  }
  ++totals_.layer_orders;
  balance_.take(done);
  if (const auto* link = done.link()) {
    totals_.weights += link->weights();
    totals_.kv += link->kv();
    totals_.act += link->act();
    totals_.stores += link->stores();
  }
  totals_.copy_in_busy_ns += done.copy_in() != nullptr ? done.copy_in()->busy_ns() : 0;
  totals_.compute_busy_ns += done.compute() != nullptr ? done.compute()->busy_ns() : 0;
  totals_.compute_wait_ns += done.compute() != nullptr ? done.compute()->wait_ns() : 0;
  totals_.copy_out_busy_ns += done.copy_out() != nullptr ? done.copy_out()->busy_ns() : 0;
}

std::optional<Received> ExecutorLink::take_results() {
  return std::exchange(results_, std::nullopt);
}

void ExecutorLink::stop(const std::string& reason) {
  const Seconds end = monotonic_now() + kFarewell;
  while (send(*channel_, messages::StopT{.reason = reason}) && monotonic_now() < end) {
    usleep(kFarewellStep);
  }
}

}  // namespace poise
