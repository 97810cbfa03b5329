#pragma once
// The planner's side of the talk with the gpu_executor: it is greeted, configures the executor, and
// sends one iteration at a time, the tables first and then a layer order for each stage, never more
// of them undone than the executor gave credits. What is sent and what is reported back goes to the
// order log. Steps do not block longer than they are told; one thread. Where the executor refuses an
// order or breaks the protocol, a step fails. One that is gone may return, or another in its place:
// what was under way is then forgotten on both sides, and it is configured anew.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "common/channel.h"
#include "common/device_kind.h"
#include "common/device_memory.h"
#include "common/order_log.h"
#include "planner/record/balance.h"
#include "planner/schedule/weight_stream.h"

namespace poise {

// What executors reported, over all that were configured in a run.
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
    std::uint32_t epoch = 0;            // another one's is another
  };

  // `log` outlives this.
  ExecutorLink(std::unique_ptr<Channel> channel, OrderLog& log, std::int32_t layers,
               const BlockSizes& sizes);

  // Sends what credits allow and takes what has come, waiting at most `timeout` where nothing has.
  // True where anything passed.
  bool step(Seconds timeout);

  const std::optional<Greeting>& greeting() const { return greeting_; }
  // Is shown every LayerDone from now on; nothing: nobody is.
  void watch(std::function<void(const messages::LayerDone&)> watcher) {
    watcher_ = std::move(watcher);
  }
  // What is sent and reported goes to `log` from now on, and is counted anew.
  void log_to(OrderLog& log) {
    log_ = &log;
    totals_ = {};
  }

  // REQUIRES: greeted.
  void configure(const DeviceLimits& limits, Bytes gpu_memory, const WeightLayout& layout,
                 bool trace);
  bool ready() const { return credits_ > 0; }
  // A message found nobody: nothing is sent any more until an executor greets.
  bool gone() const { return gone_; }
  // An executor has greeted since the last `configure`, which knows nothing of it.
  bool returned() const { return returned_; }

  // REQUIRES: ready, and no iteration is under way. `last`: none follows.
  void begin(messages::IterationT tables, bool last);
  bool busy() const { return iteration_.has_value(); }
  // The results of the iteration that was under way, once they have come.
  std::optional<Received> take_results();

  // Asks the executor to end, and waits a moment until it has: a message that it had not read would
  // be lost with the connection. Nothing happens where it is gone.
  void stop(const std::string& reason);

  const ExecutorTotals& totals() const { return totals_; }
  // Counted by a planner before this one.
  void go_on_counting(const ExecutorTotals& before) { totals_ = before; }
  // Since the executor is there, or since it was begun anew.
  const Balance& balance() const { return balance_; }
  void begin_balance() { balance_ = Balance(balance_.sizes()); }
  Seconds message_time() const { return message_time_; }  // spent on messages, waiting aside

 private:
  struct RunningIteration {
    std::uint64_t number;
    std::uint32_t mini_batches;
    bool last;
    std::uint32_t next_stage = 0;
    std::uint32_t undone = 0;  // layer orders sent and not done
  };

  template <typename Table>
  void send_logged(Table&& table);
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
