#include "gpu_executor/executor.h"

#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <thread>
#include <utility>

#include "common/families/absorption.h"
#include "common/testing/failpoint.h"
#include "common/trouble.h"

namespace poise {
namespace {

constexpr std::uint32_t kCredits = 8;
constexpr Seconds kIdleWait{0.1};   // for a message, where nothing is under way
constexpr Seconds kBusyWait{1e-3};  // for the order under way, before messages are looked for again
constexpr auto kStandsWait = std::chrono::milliseconds(1);
constexpr auto kLoaderWait = std::chrono::milliseconds(5);

// Differs from that of earlier executors by its time of start; never 0.
std::uint32_t executor_epoch() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::max<std::uint32_t>(
      1, static_cast<std::uint32_t>(
             std::chrono::duration_cast<std::chrono::milliseconds>(now).count()));
}

// What the executor may take: the least of what the device has, its own cap, and what is asked for (0: nothing is).
Bytes cap_of(const Device& device, const ExecutorOptions& options, std::uint64_t asked) {
  Bytes most = device.memory();
  if (options.gpu_memory.n > 0) {
    most = std::min(most, options.gpu_memory);
  }
  if (asked > 0) {
    most =
        std::min(most, Bytes{static_cast<std::int64_t>(std::min<std::uint64_t>(asked, INT64_MAX))});
  }
  return most;
}

// Fails where rows may not attend activations as they are.
void check_absorption(const ModelShape& shape, const DeviceLimits& limits) {
  if (const auto why_not = why_not_absorbed(shape, limits.kv_format)) {
    fail(
        "a Configure asks for attention straight from activations: of this model it cannot be, "
        "because {}",
        *why_not);
  }
}

// As a request does that kills its executor each time it runs.
void suffer(const Fault& fault, const messages::Iteration& iteration) {
  for (const messages::MiniBatch* batch : *iteration.mini_batches()) {
    if (std::ranges::find(*batch->tokens(), fault.value) != batch->tokens()->end()) {
      for (volatile bool hangs = fault.kind == Fault::Kind::hangs_of; hangs;) {
      }
      std::abort();
    }
  }
}

}  // namespace

Executor::Executor(ExecutorOptions options, std::unique_ptr<Device> device, Connect connect)
    : options_(std::move(options)),
      device_(std::move(device)),
      connect_(std::move(connect)),
      memory_(options_.run_id, *device_) {}

bool Executor::step() {
  if (!channel_) {
    if (stopping_) {
      return false;
    }
    if (!memory_.weights_ready()) {
      std::this_thread::sleep_for(kLoaderWait);
      return true;
    }
    channel_ = connect_({.run_id = options_.run_id, .layout_hash = memory_.layout_hash()});
    channel_->set_epochs({.planner = 0, .executor = executor_epoch()});
    spdlog::info("weights are mapped, {} bytes; waiting for the planner",
                 memory_.model().layout.total().n);
  }
  const bool moved = talk();
  if (moved) {
    memory_.progress();
  }
  return !stopping_ || (pipeline_ && !pipeline_->idle());
}

// Messages first, then what is finished; waits only where there is neither.
bool Executor::talk() {
  bool moved = false;
  if (!stopping_) {
    const bool idle = !pipeline_ || pipeline_->idle();
    greet();
    memory_.register_standing();
    // In the order in which they came: what is behind an iteration that waits, waits too.
    const auto next = [&](Seconds timeout) -> std::optional<Received> {
      if (!waiting_) {
        waiting_ = channel_->receive(timeout);
      }
      const auto* iteration = waiting_ ? (*waiting_)->body_as_Iteration() : nullptr;
      if (iteration != nullptr) {
        if (!memory_.stands(*iteration)) {
          std::this_thread::sleep_for(kStandsWait);
          return std::nullopt;
        }
        memory_.register_standing();  // what came to stand since: its orders copy it
      }
      return std::exchange(waiting_, std::nullopt);
    };
    auto message = next(idle ? kIdleWait : Seconds{0});
    for (; message && !stopping_; message = next({0})) {
      take(*message);
      moved = true;
    }
    if (acked_ != accepted_) {
      tell(messages::AckT{.seq = accepted_});
      acked_ = accepted_;
    }
  }
  return report(moved ? Seconds{0} : kBusyWait) || moved;
}

// A planner may go, and the next one come, while this thread is busy elsewhere.
bool Executor::planner_listens() const {
  return channel_->connected() && channel_->connections() == greeted_;
}

void Executor::greet() {
  if (planner_listens()) {
    return;
  }
  if (std::exchange(greeted_, 0) != 0) {
    forget_planner();
  }
  if (!channel_->connected()) {
    return;
  }
  messages::HelloT hello;
  hello.protocol = kProtocol;
  hello.build = build_id();
  hello.layout_hash = memory_.layout_hash();
  hello.fingerprint = memory_.fingerprint();
  hello.process = static_cast<std::uint32_t>(Process::gpu_executor);
  hello.pid = static_cast<std::uint32_t>(getpid());
  hello.device = device_->name();
  hello.device_kind = static_cast<messages::DeviceKind>(device_->kind());
  hello.device_memory = static_cast<std::uint64_t>(cap_of(*device_, options_, 0).n);
  hello.device_overhead = static_cast<std::uint64_t>(device_->overhead().n);
  hello.resident_layers = held_.weights ? held_.weights->layers() : -1;
  hello.after_death = options_.after_death;
  hello.host_threads = static_cast<std::uint32_t>(device_->host_threads());
  if (send(*channel_, std::move(hello))) {
    greeted_ = channel_->connections();
    options_.after_death = false;
  }
}

void Executor::forget_planner() {
  spdlog::info("the planner is gone");
  accepted_ = acked_ = 0;
  waiting_.reset();
  if (pipeline_) {
    check_->abandon();
    pipeline_->abandon();
    report_all();  // dropped, as the planner is gone; the buffers are free afterwards
  }
}

void Executor::take(const Received& message) {
  const std::uint32_t planner = message->planner_epoch();
  if (planner != 0) {  // an older one's is dropped by the channel
    channel_->set_epochs({.planner = planner, .executor = channel_->epochs().executor});
  }
  if (const auto* stop = message->body_as_Stop()) {
    spdlog::info("the planner says stop: {}",
                 stop->reason() != nullptr ? stop->reason()->str() : "");
    stopping_ = true;
    return;
  }
  take_order(*message);
}

// An order that is refused is answered with the reason, and none of it runs.
void Executor::take_order(const messages::Message& message) {
  try {
    switch (message.body_type()) {
      case messages::Body::Configure:
        configure(*message.body_as_Configure());
        break;
      case messages::Body::Iteration:
        begin(*message.body_as_Iteration());
        break;
      case messages::Body::LayerOrder:
        submit(*message.body_as_LayerOrder(), message.seq());
        break;
      default:
        fail("a planner does not send {}", messages::EnumNameBody(message.body_type()));
    }
    accepted_ = message.seq();
  } catch (const Failure& refusal) {
    if (refusal.code() != Exit::cannot_start) {
      throw;  // the order is not at fault
    }
    spdlog::warn("order {} is refused: {}", message.seq(), refusal.what());
    tell(messages::RejectedT{.order = message.seq(), .sentence = refusal.what()});
  }
}

void Executor::configure(const messages::Configure& configure) {
  if (check_ && !check_->between_iterations()) {
    fail("buffers are changed only between iterations");
  }
  const Model& model = memory_.model();
  const DeviceLimits limits = limits_of(configure);
  if (limits.host_attention && device_->host_threads() == 0) {
    fail("a Configure asks for attention on host cores, which the device {} does not do",
         device_->name());
  }
  if (limits.absorption) {
    check_absorption(model.shape, limits);
  }
  const Bytes allowed = cap_of(*device_, options_, configure.gpu_memory());
  report_all();
  // Before the planner waits for an answer: a large pool takes seconds to pin, and memory of the device. One that was given
  // back is let go: its memory is the next one's.
  if (const PoolNow pool = memory_.pool(); pool.epoch == 0) {
    memory_.unmap_blocks();
  } else if (!memory_.mapped(pool)) {
    memory_.map_blocks(pool);
  }
  const auto planned = [&] {
    return plan_device_memory(model.shape, model.dtype, limits, device_->overhead());
  };
  check_fits(planned(), allowed);
  const bool there = held_.weights && held_.weights->layers() == limits.resident_layers;
  std::vector<bool> streamed(static_cast<std::size_t>(model.layout.layers) + 1);
  for (std::uint32_t layer = 0; layer + 1 < streamed.size(); ++layer) {
    streamed[layer + 1] = !is_resident(limits, {layer}, model.layout.layers);
  }
  const std::vector<bool> all(streamed.size(), true);
  memory_.check_held(there ? streamed : all);
  if (held_.act_blocks != limits.gpu_act_blocks || held_.kv_blocks != limits.gpu_kv_blocks ||
      held_.kv_format != limits.kv_format) {
    held_.blocks.reset();
  }
  pipeline_.reset();
  check_.reset();
  device_->set_cap(allowed);
  // Weights that stay are uploaded once, and from then on only streamed layers are copied from: no
  // others are registered, so that the loader may give their memory back.
  if (!there) {
    held_.weights.reset();
    memory_.register_weights(all);
    held_.weights = std::make_shared<const ResidentWeights>(
        *device_, model.shape, model.dtype, model.layout, model.weights, limits.resident_layers);
    device_->finish();
  }
  memory_.register_weights(streamed);
  const DeviceMemoryPlan plan = planned();  // with the page tables of weights
  check_fits(plan, allowed);
  pipeline_.emplace(*device_, model, limits, allowed, configure.trace(), held_.weights,
                    held_.blocks);
  held_.blocks = pipeline_->blocks();
  held_.act_blocks = limits.gpu_act_blocks;
  held_.kv_blocks = limits.gpu_kv_blocks;
  held_.kv_format = limits.kv_format;
  check_.emplace(model.shape, model.layout, limits, kCredits);
  spdlog::info("device memory, of {} bytes allowed:\n{}", allowed.n, to_text(plan));
  messages::ReadyT ready;
  ready.device_bytes = static_cast<std::uint64_t>((device_->in_use() + device_->overhead()).n);
  ready.host_bytes = static_cast<std::uint64_t>(device_->host_in_use().n);
  ready.credits = kCredits;
  ready.device_began_ns = static_cast<std::uint64_t>(
      std::chrono::nanoseconds(device_->opened().time_since_epoch()).count());
  ready.link_bytes_per_s = static_cast<std::uint64_t>(device_->link_bytes_per_s());
  tell(std::move(ready));
}

void Executor::begin(const messages::Iteration& iteration) {
  if (!check_) {
    fail("iteration {} comes before any Configure", iteration.iteration());
  }
  const PoolNow pool = memory_.pool();
  const bool named = pool.epoch != 0 && iteration.pool_epoch() == pool.epoch;
  if (named && !memory_.mapped(pool)) {
    if (!check_->between_iterations()) {
      fail(
          "iteration {} names blocks of pool epoch {} while orders of an older pool have yet to "
          "come",
          iteration.iteration(), pool.epoch);
    }
    report_all();  // until then the blocks before may be in use
    memory_.map_blocks(pool);
    const Model& model = memory_.model();  // a larger pool has larger page tables on the device
    check_fits(plan_device_memory(model.shape, model.dtype, check_->limits(), device_->overhead()),
               device_->cap());
  }
  const HostBlocks blocks = named ? memory_.blocks(pool) : HostBlocks{};
  auto after = check_->accept(iteration, pool);
  if (const Fault fault = failpoint("executor.tokens"); fault.kind != Fault::Kind::none) {
    suffer(fault, iteration);
  }
  pipeline_->begin(iteration, std::move(after), blocks);
}

void Executor::submit(const messages::LayerOrder& order, std::uint64_t seq) {
  if (!check_) {
    fail("an order comes before any Configure");
  }
  try {
    check_->accept(order);
  } catch (const Failure&) {
    check_->abandon();  // the iteration cannot go on without it
    pipeline_->abandon();
    throw;
  }
  pipeline_->submit(make_order(order, seq));
}

// Reports finished orders, waiting at most `timeout` for the first.
bool Executor::report(Seconds timeout) {
  bool any = false;
  while (pipeline_ && !pipeline_->idle()) {
    auto done = pipeline_->poll(any ? Seconds{0} : timeout);
    if (!done) {
      break;
    }
    any = true;
    check_->done();
    memory_.progress();
    failpoint("executor.result_ready");
    tell(std::move(done->layer));
    failpoint("executor.result_sent");
    if (done->iteration) {
      tell(std::move(*done->iteration));
    }
  }
  return any;
}

void Executor::report_all() {
  while (pipeline_ && !pipeline_->idle()) {
    report(kIdleWait);
  }
}

// A message to a planner that is gone is dropped.
template <typename Table>
void Executor::tell(Table&& table) {
  if (!send(*channel_, std::forward<Table>(table)) && planner_listens()) {
    fail(Exit::interrupted, "the planner takes no more messages");
  }
}

}  // namespace poise
