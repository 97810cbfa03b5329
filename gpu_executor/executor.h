#pragma once
// Process 3: obeys. Waits for the sealed weights, greets the planner (Hello), sets its buffers up
// as Configure says (Ready), checks and runs orders, and reports what it did (Ack, LayerDone,
// IterationDone) or why it refused (Rejected). One thread. `step` waits at most about 0.1 s for something to
// do. It waits longer where queued work must end first: before Configure, before another pool is mapped, and
// when the planner goes away, whose queued work is finished and its reports dropped. The next planner that
// connects gets a Hello of its own.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "common/channel.h"
#include "gpu_executor/device.h"
#include "gpu_executor/host_memory.h"
#include "gpu_executor/order_check/order_check.h"
#include "gpu_executor/pipeline.h"

namespace poise {

struct ExecutorOptions {
  std::string run_id;
  Bytes gpu_memory{0};       // cap; 0: what the device has
  bool after_death = false;  // it replaces an executor that nobody had asked to end
};

class Executor {
 public:
  using Connect = std::function<std::unique_ptr<Channel>(const Identity&)>;

  // Fails where the run has no control segment.
  Executor(ExecutorOptions options, std::unique_ptr<Device> device, Connect connect);

  // Does what there is to do, or waits for it; false when all is done and the process may end.
  bool step();
  // Take no more orders; end when those that are queued are done.
  void stop() { stopping_ = true; }

 private:
  bool talk();
  bool report(Seconds timeout);
  void report_all();
  void greet();
  bool planner_listens() const;
  void forget_planner();
  void take(const Received& message);
  void take_order(const messages::Message& message);
  void configure(const messages::Configure& configure);
  void begin(const messages::Iteration& iteration);
  void submit(const messages::LayerOrder& order, std::uint64_t seq);
  template <typename Table>
  void tell(Table&& table);

  // What stays on the device from Configure to Configure, also if one fails.
  struct OnDevice {
    std::shared_ptr<const ResidentWeights> weights;
    std::shared_ptr<Buffer> blocks;  // as many of each kind as follow
    std::int32_t act_blocks = 0, kv_blocks = 0;
    KvFormat kv_format = KvFormat::plain;
  };

  ExecutorOptions options_;  // `after_death` until a planner was told
  const std::unique_ptr<Device> device_;
  const Connect connect_;
  HostMemory memory_;
  std::unique_ptr<Channel> channel_;  // once the weights are there
  std::optional<Received> waiting_;   // an Iteration whose blocks' memory is still being made
  std::optional<OrderCheck> check_;   // both once configured
  OnDevice held_;
  std::optional<Pipeline> pipeline_;
  std::uint64_t greeted_ = 0;  // the connection on which Hello was said; 0: on none that stands
  bool stopping_ = false;
  std::uint64_t accepted_ = 0;  // seq of the last order accepted
  std::uint64_t acked_ = 0;
};

}  // namespace poise
