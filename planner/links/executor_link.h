#pragma once
// The planner's side of the connection to the gpu_executor. The executor says Hello and is configured.
// Then the link sends one iteration at a time: the tables first, then a layer order for each stage,
// with no more unfinished orders than the executor gave credits. Messages and reports go to the order
// log. A step blocks no longer than its timeout; one thread. A step fails if the executor refuses an
// order or breaks the protocol. A lost executor may return, or another may replace it: both sides then
// drop the iteration under way, and the executor is configured again.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/channel.h"
#include "common/device_kind.h"
#include "common/device_memory.h"
#include "common/order_log.h"
#include "planner/record/balance.h"
#include "planner/schedule/weight_stream.h"

namespace poise {

// The sum of what all executors of a run reported.
struct ExecutorTotals {
  std::uint64_t layer_orders = 0;
  std::uint64_t weights = 0, kv = 0, act = 0, stores = 0;  // bytes over the link
  std::uint64_t copy_in_busy_ns = 0, compute_busy_ns = 0, copy_out_busy_ns = 0;
  std::uint64_t compute_wait_ns = 0;
};

class ExecutorLink {
 public:
  struct Greeting {
    std::int32_t pid;
    std::string device;  // "cpu, 2 threads"
    DeviceKind kind;
    Bytes memory;                       // it could use at most
    Bytes overhead;                     // of it, taken beside buffers
    std::int32_t resident_layers = -1;  // whose weights it holds already; -1: none yet
    std::uint32_t epoch = 0;            // differs between executors
    bool after_death = false;           // the one before it died, and nobody had asked it to end
    std::uint32_t host_threads = 0;     // that attend on host cores; 0: it does not
  };

  // `log` outlives this.
  ExecutorLink(std::unique_ptr<Channel> channel, OrderLog& log, std::int32_t layers,
               const BlockSizes& sizes);

  // Sends what credits allow and handles what has arrived; waits at most `timeout` if nothing has. True
  // if a message was sent or received.
  bool step(Seconds timeout);

  const std::optional<Greeting>& greeting() const { return greeting_; }
  // Called with every LayerDone from now on; nothing: none is called.
  void watch(std::function<void(const messages::LayerDone&)> watcher) {
    watcher_ = std::move(watcher);
  }
  // From now on messages and reports go to `log`, and counting starts again.
  void log_to(OrderLog& log) {
    log_ = &log;
    totals_ = {};
  }

  // REQUIRES: greeted.
  void configure(const DeviceLimits& limits, Bytes gpu_memory, const WeightLayout& layout,
                 bool trace);
  // As an order log has it, for a replay; every iteration then brings its orders.
  void configure(messages::ConfigureT configure);
  bool ready() const { return credits_ > 0; }
  // Of the link at most, as the device last said; 0: it does not know.
  std::uint64_t link_bytes_per_s() const { return link_bytes_per_s_; }
  // A message could not be delivered: nothing is sent until an executor says Hello.
  bool gone() const { return gone_; }
  // A new executor has said Hello since the last `configure`, and is not configured yet.
  bool returned() const { return returned_; }

  // REQUIRES: ready, and no iteration is under way. `last`: none follows. `idle`: the link's idle time, which weights fill;
  // empty without a profile.
  void begin(messages::IterationT tables, bool last, LinkIdle idle = {});
  // With these orders, one for each stage, as an order log has them.
  void begin(messages::IterationT tables, std::vector<messages::LayerOrderT> orders);
  bool busy() const { return iteration_.has_value(); }
  // The results of the iteration that was under way, once they have come.
  std::optional<Received> take_results();

  // Asks the executor to end and waits a moment for it: otherwise an unread message would be lost with
  // the connection. Does nothing if it is gone.
  void stop(const std::string& reason);

  const ExecutorTotals& totals() const { return totals_; }
  // Counted by a planner before this one.
  void go_on_counting(const ExecutorTotals& before) { totals_ = before; }
  // Since the executor arrived, or since counting started again.
  const Balance& balance() const { return balance_; }
  // There is nothing to order: the time until the next iteration is not counted.
  void pause_balance() { balance_.pause(); }
  void begin_balance() { balance_ = Balance(balance_.sizes()); }
  Seconds message_time() const { return message_time_; }  // spent on messages, without waiting

 private:
  struct RunningIteration {
    std::uint64_t number;
    std::uint32_t mini_batches;
    bool last;
    LinkIdle idle;
    std::vector<messages::LayerOrderT> recorded{};  // empty: they are made
    std::uint32_t next_stage = 0;
    std::uint32_t undone = 0;  // layer orders sent and not done
  };

  template <typename Table>
  void send_logged(Table&& table);
  messages::LayerOrderT next_order();
  bool send_orders();
  void take(Received message);
  void take(const messages::Hello& hello, std::uint32_t epoch);
  void take(const messages::LayerDone& done);

  std::unique_ptr<Channel> channel_;
  OrderLog* log_;
  std::uint32_t last_stage_;  // the head
  std::optional<Greeting> greeting_;
  bool configured_ = false;
  bool gone_ = false;
  bool returned_ = false;
  std::uint32_t credits_ = 0;
  std::uint64_t link_bytes_per_s_ = 0;
  std::optional<WeightStream> weights_;
  std::optional<RunningIteration> iteration_;
  std::optional<Received> results_;
  std::function<void(const messages::LayerDone&)> watcher_;
  ExecutorTotals totals_;
  Balance balance_;
  Seconds message_time_{};
  std::vector<std::byte> sent_;
};

}  // namespace poise
