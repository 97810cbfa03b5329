#include "gpu_executor/executor.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <map>

#include "common/process.h"
#include "common/testing/failpoint.h"
#include "common/trouble.h"
#include "tests/gpu_executor/loopback.h"
#include "tests/gpu_executor/pipeline_run.h"
#include "tests/gpu_executor/recording_device.h"

namespace poise::test {
namespace {

using messages::Body;
using testing::HasSubstr;

class ExecutorTest : public testing::Test {
 protected:
  ExecutorTest() {
    open_log("test", "");  // nothing
    plan_ = {.sequences = random_sequences(model_.shape, {37, 21, 50}, 7), .kind = mixed};
    open(0);
  }

  void open(std::int64_t gpu_memory) {
    auto device = open_cpu_device(setting_.device);
    device_ = device.get();
    open(gpu_memory, std::move(device));
  }
  void open(std::int64_t gpu_memory, std::unique_ptr<Device> device) {
    executor_ = std::make_unique<Executor>(
        ExecutorOptions{.run_id = loader_.run_id, .gpu_memory = {gpu_memory}}, std::move(device),
        [this](const Identity& identity) {
          EXPECT_EQ(identity.run_id, loader_.run_id);
          EXPECT_EQ(identity.layout_hash, model_.layout.hash());
          return std::make_unique<Loopback>(wires_);
        });
  }

  // Steps until the executor says something; fails where it stays silent.
  messages::MessageT next() {
    for (int step = 0; step < 20'000; ++step) {
      if (auto message = wires_->take()) {
        return std::move(*message);
      }
      executor_->step();
    }
    ADD_FAILURE() << "the executor says nothing";
    return {};
  }
  messages::MessageT next(Body type) {
    messages::MessageT message = next();
    EXPECT_EQ(message.body.type, type)
        << messages::EnumNameBody(message.body.type)
        << (message.body.type == Body::Rejected ? ": " + message.body.AsRejected()->sentence : "");
    return message;
  }
  // … Acks aside.
  messages::MessageT next_but_ack() {
    messages::MessageT message = next();
    while (message.body.type == Body::Ack) {
      message = next();
    }
    return message;
  }

  messages::ConfigureT configure() const {
    messages::ConfigureT configure;
    configure.resident_layers = setting_.limits.resident_layers;
    configure.max_rows = setting_.limits.max_rows;
    configure.max_mini_batch_rows = setting_.limits.max_mini_batch_rows;
    configure.max_sequences = setting_.limits.max_sequences;
    configure.act_slots = setting_.limits.act_slots;
    configure.kv_slots = setting_.limits.kv_slots;
    configure.logits_rows = setting_.limits.logits_rows;
    configure.max_context = setting_.limits.max_context;
    configure.logit_edits = setting_.limits.logit_edits;
    return configure;
  }

  void make_ready() {
    loader_.seal();
    pool_ = loader_.make_pool(64, 64);
    next(Body::Hello);
    wires_->send(configure());
    next(Body::Ready);
    next(Body::Ack);
  }

  // Sends an iteration and its orders as credits allow; returns what was said of them.
  struct Said {
    std::vector<messages::LayerDoneT> layers;
    messages::IterationDoneT iteration;
  };
  Said run(const Planned& planned) {
    wires_->send(planned.tables);
    Said said;
    std::size_t sent = 0;
    while (true) {
      while (sent < planned.orders.size() && sent < said.layers.size() + 8) {
        wires_->send(planned.orders[sent++]);
      }
      messages::MessageT message = next_but_ack();
      if (message.body.type == Body::LayerDone) {
        said.layers.push_back(std::move(*message.body.AsLayerDone()));
      } else if (message.body.type == Body::IterationDone) {
        said.iteration = std::move(*message.body.AsIterationDone());
        return said;
      } else {
        ADD_FAILURE() << messages::EnumNameBody(message.body.type);
        return said;
      }
    }
  }

  SmallPlanner planner() { return {plan_, model_.layout, setting_.limits, pool_}; }

  const TinyModel model_{tiny_shape(), DType::float16, 21};
  Setting setting_;
  Plan plan_;
  HandmadeLoader loader_{model_};
  std::shared_ptr<Wires> wires_ = std::make_shared<Wires>();
  PoolPartition pool_{};
  CpuDevice* device_ = nullptr;
  std::unique_ptr<Executor> executor_;
};

TEST_F(ExecutorTest, WaitsForTheWeightsThenGreets) {
  for (int step = 0; step < 5; ++step) {
    EXPECT_TRUE(executor_->step());
  }
  EXPECT_TRUE(wires_->to_planner.empty());
  loader_.seal();
  const messages::MessageT message = next(Body::Hello);
  const messages::HelloT& hello = *message.body.AsHello();
  EXPECT_EQ(hello.build, build_id());
  EXPECT_EQ(hello.layout_hash, model_.layout.hash());
  EXPECT_EQ(hello.process, static_cast<std::uint32_t>(Process::gpu_executor));
  EXPECT_EQ(hello.device, "cpu, 1 thread");
  EXPECT_EQ(hello.device_kind, messages::DeviceKind::Cpu);
  EXPECT_EQ(hello.device_memory, static_cast<std::uint64_t>((kMiB * 64).n));
  EXPECT_GT(message.executor_epoch, 0u);
}

TEST_F(ExecutorTest, ALoaderThatEndsFirstIsAnInterruption) {
  loader_.control().loader_state.store(static_cast<std::uint32_t>(LoaderState::draining));
  try {
    executor_->step();
    FAIL();
  } catch (const Failure& failure) {
    EXPECT_EQ(failure.code(), Exit::interrupted);
  }
}

TEST_F(ExecutorTest, WeightsLaidOutOtherwiseAreForeign) {
  loader_.control().layout_hash ^= 1;
  loader_.seal();
  EXPECT_THROW(executor_->step(), Failure);
}

TEST_F(ExecutorTest, SaysWhatItsBuffersTake) {
  loader_.seal();
  next(Body::Hello);
  wires_->send(configure());
  const messages::MessageT message = next(Body::Ready);
  const messages::ReadyT& ready = *message.body.AsReady();
  const auto planned = plan_device_memory(model_.shape, model_.dtype, setting_.limits, {0}).total;
  EXPECT_EQ(ready.device_bytes, static_cast<std::uint64_t>(planned.n));
  EXPECT_EQ(device_->in_use(), planned);
  EXPECT_EQ(ready.credits, 8u);
  // Configured again, the old buffers go first.
  wires_->send(configure());
  next(Body::Ack);
  next(Body::Ready);
  EXPECT_EQ(device_->peak(), planned);
}

TEST_F(ExecutorTest, BuffersThatDoNotFitAreRefusedAndThoseBeforeStay) {
  make_ready();
  messages::ConfigureT larger = configure();
  larger.kv_slots = 1 << 20;
  const std::uint64_t seq = wires_->send(larger);
  messages::MessageT message = next(Body::Rejected);
  EXPECT_EQ(message.body.AsRejected()->order, seq);
  EXPECT_THAT(message.body.AsRejected()->sentence, HasSubstr("64.0 MiB are allowed"));
  larger = configure();
  larger.gpu_memory = 100'000;
  wires_->send(larger);
  EXPECT_THAT(next(Body::Rejected).body.AsRejected()->sentence, HasSubstr("97.7 KiB are allowed"));
  larger.max_rows = -4;
  wires_->send(larger);
  EXPECT_THAT(next(Body::Rejected).body.AsRejected()->sentence, HasSubstr("max_rows is -4"));
  SmallPlanner planner = this->planner();
  EXPECT_EQ(run(planner.next()).layers.size(), 5u);
}

TEST_F(ExecutorTest, AttentionStraightFromActivationsIsRefusedWhereItCannotBe) {
  make_ready();
  messages::ConfigureT absorbing = configure();
  absorbing.absorption = true;
  absorbing.kv_format = messages::KvFormat::Int8;
  wires_->send(absorbing);
  EXPECT_THAT(next(Body::Rejected).body.AsRejected()->sentence,
              HasSubstr("its keys and values are kept as codes"));
  absorbing.kv_format = messages::KvFormat::Plain;
  wires_->send(absorbing);
  next(Body::Ready);
}

TEST_F(ExecutorTest, AConfigureThatFailsLateLosesNoBlockOnTheDevice) {
  loader_.seal();
  next(Body::Hello);
  messages::ConfigureT configure = this->configure();
  configure.gpu_kv_blocks = setting_.limits.gpu_kv_blocks = 8;
  wires_->send(configure);
  next(Body::Ready);
  next(Body::Ack);
  arm_failpoints("device.allocate:fail", "");
  wires_->send(configure);
  EXPECT_THAT(next(Body::Rejected).body.AsRejected()->sentence, HasSubstr("cannot be had"));
  arm_failpoints("", "");
  const DeviceSizes sizes = device_sizes(model_.shape, model_.dtype, setting_.limits);
  EXPECT_EQ(device_->in_use(), sizes.outer_slab + sizes.context_blocks +
                                   sizes.layer_slab * setting_.limits.resident_layers);
  wires_->send(configure);
  next(Body::Ready);
}

// As a GPU's page tables of pinned memory do.
class PagingDevice final : public RecordingDevice {
 public:
  Bytes overhead() const override { return {pinned_ / 16}; }

 protected:
  void pin(std::span<const std::span<std::byte>> parts, bool) override {
    for (const auto part : parts) {
      pinned_ += std::ssize(part);
    }
  }
  void unpin(std::span<const std::span<std::byte>> parts) override {
    for (const std::span<std::byte> part : parts) {
      pinned_ -= std::ssize(part);
    }
  }

 private:
  std::int64_t pinned_ = 0;
};

// Notes which memory is registered to be written: of a pool.
class RegisteringDevice final : public RecordingDevice {
 public:
  RegisteringDevice() { left = 0; }
  void expect_registered(Bytes more) override { expected = more; }
  std::uint64_t pool_bytes() const {
    std::uint64_t sum = 0;
    for (const auto& [begin, bytes] : parts_) {
      sum += bytes;
    }
    return sum;
  }

  Bytes expected{};
  static inline std::int64_t left = 0;  // registrations

 protected:
  void pin(std::span<const std::span<std::byte>> parts, bool read_only) override {
    for (const std::span<std::byte> part : parts) {
      ++left;
      if (!read_only) {
        const auto next = parts_.lower_bound(part.data());
        EXPECT_TRUE(next == parts_.end() || part.data() + part.size() <= next->first);
        EXPECT_TRUE(parts_.emplace(part.data(), part.size()).second) << "registered twice";
      }
    }
  }
  void unpin(std::span<const std::span<std::byte>> parts) override { left -= std::ssize(parts); }

 private:
  std::map<const std::byte*, std::size_t> parts_;
};

TEST_F(ExecutorTest, ALargerPoolWhosePageTablesAreBeyondTheCapIsRefused) {
  open(0, std::make_unique<PagingDevice>());
  loader_.seal();
  pool_ = loader_.make_pool(64, 64);
  next(Body::Hello);
  messages::ConfigureT configure = this->configure();
  wires_->send(configure);
  configure.gpu_memory = next(Body::Ready).body.AsReady()->device_bytes;
  wires_->send(configure);
  EXPECT_EQ(next_but_ack().body.type, Body::Ready);
  Planned planned = planner().next();
  loader_.make_pool(640, 640);
  planned.tables.pool_epoch = 2;
  wires_->send(planned.tables);
  EXPECT_THAT(next_but_ack().body.AsRejected()->sentence, HasSubstr("device memory: "));
}

TEST_F(ExecutorTest, TheCommandLinesCapHoldsToo) {
  executor_.reset();
  open(200'000);
  loader_.seal();
  EXPECT_EQ(next(Body::Hello).body.AsHello()->device_memory, 200'000u);
  wires_->send(configure());
  EXPECT_THAT(next(Body::Rejected).body.AsRejected()->sentence, HasSubstr("195.3 KiB are allowed"));
}

TEST_F(ExecutorTest, RunsOrdersAndTellsWhatStraightRunsTell) {
  make_ready();
  const Outcome expected = run_pipeline(model_, plan_, setting_);
  SmallPlanner planner = this->planner();
  std::size_t compared = 0;
  std::map<std::uint32_t, std::size_t> positions;
  for (Planned planned = planner.next(); !planned.orders.empty(); planned = planner.next()) {
    const Said said = run(planned);
    EXPECT_EQ(said.layers.size(), 5u);
    EXPECT_EQ(said.iteration.iteration, planned.tables.iteration);
    for (const auto& result : said.iteration.results) {
      for (const auto& row : result->prompt) {
        EXPECT_EQ(bits_of(*row), expected.rows.at({result->request, ++positions[result->request]}));
        ++compared;
      }
    }
  }
  EXPECT_EQ(compared, 37u + 21 + 50 - 3);
}

// The host has other uses for the memory of layers that the device holds.
TEST_F(ExecutorTest, LayersItHoldsNeedNoHostMemoryAnyMore) {
  make_ready();
  const Outcome expected = run_pipeline(model_, plan_, setting_);
  loader_.release_layers(setting_.limits.resident_layers, model_.layout);
  messages::ConfigureT other = configure();
  other.resident_layers = 2;
  wires_->send(other);
  EXPECT_THAT(next(Body::Rejected).body.AsRejected()->sentence,
              HasSubstr("not in host memory any more"));
  wires_->send(configure());  // other buffers, the same layers
  next(Body::Ready);
  next(Body::Ack);
  SmallPlanner planner = this->planner();
  std::size_t compared = 0;
  std::map<std::uint32_t, std::size_t> positions;
  for (Planned planned = planner.next(); !planned.orders.empty(); planned = planner.next()) {
    for (const auto& result : run(planned).iteration.results) {
      for (const auto& row : result->prompt) {
        EXPECT_EQ(bits_of(*row), expected.rows.at({result->request, ++positions[result->request]}));
        ++compared;
      }
    }
  }
  EXPECT_EQ(compared, 37u + 21 + 50 - 3);

  executor_.reset();
  wires_ = std::make_shared<Wires>();
  open(0);
  EXPECT_EQ(next(Body::Hello).body.AsHello()->resident_layers, -1);
  wires_->send(configure());
  EXPECT_THAT(next(Body::Rejected).body.AsRejected()->sentence,
              HasSubstr("not in host memory any more"));
}

TEST_F(ExecutorTest, ReportsBytesCountsAndTimes) {
  make_ready();
  SmallPlanner planner = this->planner();
  run(planner.next());
  const Planned decode = planner.next();
  const Said said = run(decode);
  const BlockSizes sizes = block_sizes(model_.shape, model_.dtype, KvFormat::plain);
  std::uint64_t kv = 0, act = 0, stores = 0;
  for (const auto& batch : decode.tables.mini_batches) {
    for (const messages::BlockRun& load : batch->loads) {
      const auto rows = (load.count() - 1) * 16 + load.tail_tokens();
      (load.kind() == messages::Kind::Kv ? kv : act) +=
          rows * static_cast<std::uint64_t>(sizes.row(static_cast<BlockKind>(load.kind())).n);
    }
    for (const messages::Store& store : batch->stores) {
      stores += store.count() *
                static_cast<std::uint64_t>(sizes.row(static_cast<BlockKind>(store.kind())).n);
    }
  }
  for (std::size_t stage = 0; stage < said.layers.size(); ++stage) {
    const messages::LayerDoneT& done = said.layers[stage];
    const bool layer = stage >= 1 && stage <= 3;
    EXPECT_EQ(done.stage, stage);
    EXPECT_EQ(done.link->kv(), layer ? kv : 0);
    EXPECT_EQ(done.link->act(), layer ? act : 0);
    EXPECT_EQ(done.link->stores(), layer ? stores : 0);
    // Layer 1 is fetched by stage 3 for the next iteration, layer 2 by stage 2.
    const bool fetches = stage == 2 || stage == 3;
    EXPECT_EQ(done.link->weights() > 0, fetches);
    if (layer) {
      EXPECT_EQ(done.copy_out->bytes(), stores);
      EXPECT_GT(done.copy_in->bytes(), kv + act + done.link->weights());
    }
    EXPECT_GT(done.compute->busy_ns(), 0u);
    ASSERT_EQ(done.mini_batches.size(), decode.tables.mini_batches.size());
    std::uint64_t compute_ns = 0;
    for (std::size_t i = 0; i < done.mini_batches.size(); ++i) {
      const auto& loads = decode.tables.mini_batches[i]->loads;
      std::uint32_t blocks = 0;
      for (const messages::BlockRun& load : loads) {
        blocks += load.count();
      }
      EXPECT_EQ(done.mini_batches[i].kv_blocks() + done.mini_batches[i].act_blocks(),
                layer ? blocks : 0);
      EXPECT_EQ(done.mini_batches[i].rows(), decode.tables.mini_batches[i]->tokens.size());
      compute_ns += done.mini_batches[i].compute_ns();
    }
    EXPECT_EQ(compute_ns, done.compute->busy_ns());
  }
}

TEST_F(ExecutorTest, ABadOrderIsRefusedNothingOfItRunsAndTheNextIterationDoes) {
  make_ready();
  SmallPlanner planner = this->planner();
  Planned planned = planner.next();
  wires_->send(planned.tables);
  next(Body::Ack);
  planned.orders[0].mini_batches = {9, 0};
  const std::vector<std::byte> before(loader_.blocks().begin(), loader_.blocks().end());
  const std::uint64_t seq = wires_->send(planned.orders[0]);
  messages::MessageT message = next(Body::Rejected);
  EXPECT_EQ(message.body.AsRejected()->order, seq);
  EXPECT_THAT(message.body.AsRejected()->sentence, HasSubstr("mini-batch 9"));
  // The iteration is over with it.
  wires_->send(planned.orders[1]);
  EXPECT_THAT(next(Body::Rejected).body.AsRejected()->sentence, HasSubstr("was refused"));
  EXPECT_TRUE(std::ranges::equal(before, loader_.blocks()));

  planned = this->planner().next();
  planned.tables.iteration = 2;
  for (auto& order : planned.orders) {
    order.iteration = 2;
  }
  const Said said = run(planned);
  EXPECT_EQ(said.iteration.iteration, 2u);
  EXPECT_FALSE(std::ranges::equal(before, loader_.blocks()));
}

TEST_F(ExecutorTest, OrdersBeforeAnyConfigureAreRefused) {
  loader_.seal();
  pool_ = loader_.make_pool(64, 64);
  next(Body::Hello);
  const Planned planned = planner().next();
  wires_->send(planned.tables);
  EXPECT_THAT(next(Body::Rejected).body.AsRejected()->sentence, HasSubstr("before any Configure"));
  wires_->send(planned.orders[0]);
  EXPECT_THAT(next(Body::Rejected).body.AsRejected()->sentence, HasSubstr("before any Configure"));
  wires_->send(messages::HelloT());
  EXPECT_THAT(next(Body::Rejected).body.AsRejected()->sentence, HasSubstr("does not send Hello"));
}

TEST_F(ExecutorTest, BuffersAreNotChangedInTheMiddleOfAnIteration) {
  make_ready();
  const Planned planned = planner().next();
  wires_->send(planned.tables);
  wires_->send(planned.orders[0]);
  wires_->send(configure());
  EXPECT_THAT(next_but_ack().body.AsRejected()->sentence, HasSubstr("only between iterations"));
}

TEST_F(ExecutorTest, APoolMadeAnewIsMappedWhenAnOrderNamesIt) {
  make_ready();
  run(planner().next());
  pool_ = loader_.make_pool(40, 90);
  SmallPlanner planner = this->planner();
  Planned planned = planner.next();
  planned.tables.iteration = 2;
  wires_->send(planned.tables);  // still of epoch 1
  EXPECT_THAT(next(Body::Rejected).body.AsRejected()->sentence,
              HasSubstr("pool epoch 1, the pool's epoch is 2"));
  planned.tables.iteration = 3;
  planned.tables.pool_epoch = 2;
  for (auto& order : planned.orders) {
    order.iteration = 3;
  }
  planned.orders[0].fetch.clear();  // layer 1 is there since the iteration before
  EXPECT_EQ(run(planned).iteration.iteration, 3u);
  EXPECT_TRUE(std::ranges::any_of(loader_.blocks(), [](std::byte b) { return b != std::byte{0}; }));
}

// Else the pool that costs were measured with stands beside the run's, which is planned with less memory then.
TEST_F(ExecutorTest, APoolThatWasGivenBackIsUnmappedWithTheNextConfigure) {
  make_ready();
  run(planner().next());
  loader_.give_up_pool();
  EXPECT_FALSE(loader_.pool_is_unused());
  wires_->send(configure());
  EXPECT_NE(next_but_ack().body.AsReady(), nullptr);
  EXPECT_TRUE(loader_.pool_is_unused());
  pool_ = loader_.make_pool(40, 90);
  Planned planned = planner().next();
  planned.tables.pool_epoch = 2;
  EXPECT_EQ(run(planned).iteration.iteration, 1u);
  EXPECT_TRUE(std::ranges::any_of(loader_.blocks(), [](std::byte b) { return b != std::byte{0}; }));
}

TEST_F(ExecutorTest, APoolIsNotExchangedUnderAnIterationWhoseOrdersHaveYetToCome) {
  make_ready();
  SmallPlanner planner = this->planner();
  const Planned planned = planner.next();
  wires_->send(planned.tables);
  wires_->send(planned.orders[0]);
  EXPECT_NE(next_but_ack().body.AsLayerDone(), nullptr);
  loader_.make_pool(40, 90);
  Planned other = planner.next();
  other.tables.iteration = 2;
  other.tables.pool_epoch = 2;
  wires_->send(other.tables);
  EXPECT_THAT(next_but_ack().body.AsRejected()->sentence, HasSubstr("have yet to come"));
}

// The loader makes the pool's memory behind the work.
TEST_F(ExecutorTest, AnIterationWaitsUntilItsBlocksStandAndThenRuns) {
  make_ready();
  const std::uint64_t region = loader_.control().pool.region_bytes;
  loader_.control().pool_standing = 0;
  const Planned planned = planner().next();
  wires_->send(planned.tables);
  std::uint64_t last = 0;
  for (const auto& order : planned.orders) {
    last = wires_->send(order);
  }
  for (int step = 0; step < 20; ++step) {
    executor_->step();
    EXPECT_FALSE(wires_->take().has_value()) << "nothing is checked, and nothing runs";
  }
  loader_.control().pool_standing = region;
  EXPECT_EQ(next(Body::Ack).body.AsAck()->seq, last);
  EXPECT_EQ(next().body.type, Body::LayerDone);
}

TEST_F(ExecutorTest, BlocksThatStandMayBeUsedBeforeTheOthersDo) {
  make_ready();
  const PoolPartition pool = loader_.control().pool;
  const BlockSizes sizes = block_sizes(model_.shape, model_.dtype, KvFormat::plain);
  messages::IterationT tables = planner().next().tables;
  std::uint64_t farthest = 0;
  for (auto& batch : tables.mini_batches) {
    for (const messages::Store& store : batch->stores) {
      const auto size = static_cast<std::uint64_t>(
          sizes.block(store.kind() == messages::Kind::Kv ? BlockKind::kv : BlockKind::act).n);
      farthest = std::max(farthest, (store.block() + 1) * size);
    }
  }
  ASSERT_GT(farthest, 1u);
  ASSERT_LT(farthest, pool.region_bytes);
  loader_.control().pool_standing = farthest - 1;
  wires_->send(tables);
  for (int step = 0; step < 20; ++step) {
    executor_->step();
  }
  EXPECT_FALSE(wires_->take().has_value());
  loader_.control().pool_standing = farthest;
  next(Body::Ack);
}

TEST_F(ExecutorTest, WhoWaitsForAPoolsMemoryEndsWithTheLoader) {
  make_ready();
  loader_.control().pool_standing = 0;
  wires_->send(planner().next().tables);
  executor_->step();
  loader_.control().loader_state = static_cast<std::uint32_t>(LoaderState::draining);
  try {
    executor_->step();
    ADD_FAILURE() << "it waits for what cannot come";
  } catch (const Failure& failure) {
    EXPECT_EQ(failure.code(), Exit::interrupted);
    EXPECT_THAT(failure.what(), HasSubstr("before the block pool's memory"));
  }
}

// A pool of which 8192 bytes at each end of a layer's region are there.
class GrowingPoolTest : public ExecutorTest {
 protected:
  RegisteringDevice& make_ready() {
    auto recording = std::make_unique<RegisteringDevice>();
    RegisteringDevice& device = *recording;
    open(0, std::move(recording));
    loader_.seal();
    pool_ = loader_.make_pool(640, 640);
    loader_.control().pool_standing = 8192;
    next(Body::Hello);
    wires_->send(configure());
    next(Body::Ready);
    return device;
  }
};

// What is copied lies in one registration: it begins where another ended.
TEST_F(GrowingPoolTest, IsRegisteredAsItComesToStand) {
  const RegisteringDevice& device = make_ready();
  const std::uint64_t region = loader_.control().pool.region_bytes;
  const auto layers = static_cast<std::uint64_t>(model_.shape.num_hidden_layers);
  EXPECT_EQ(device.pool_bytes(), 2 * 8192 * layers);
  EXPECT_EQ(device.expected.n, static_cast<std::int64_t>((region - 2 * 8192) * layers));
  loader_.control().pool_standing = 3 * 8192;
  executor_->step();
  EXPECT_EQ(device.pool_bytes(), 6 * 8192 * layers);
  loader_.control().pool_standing = region;
  executor_->step();
  EXPECT_EQ(device.pool_bytes(), region * layers);
  EXPECT_EQ(device.expected.n, 0);
  executor_.reset();
  EXPECT_EQ(RegisteringDevice::left, 0);
}

// Orders that are accepted copy what came to stand while the executor waited for them.
TEST_F(GrowingPoolTest, WhatStandsForAnIterationIsRegisteredBeforeItsOrdersRun) {
  const RegisteringDevice& device = make_ready();
  const std::uint64_t region = loader_.control().pool.region_bytes;
  const auto layers = static_cast<std::uint64_t>(model_.shape.num_hidden_layers);
  wires_->send(planner().next().tables);
  wires_->meanwhile = [&] { loader_.control().pool_standing = region; };
  executor_->step();
  std::uint64_t accepted = 0;
  while (const auto message = wires_->take()) {
    accepted = message->body.type == Body::Ack ? message->body.AsAck()->seq : 0;
  }
  EXPECT_EQ(accepted, wires_->seq);
  EXPECT_EQ(device.pool_bytes(), region * layers);
}

TEST_F(ExecutorTest, APoolWhoseHeaderLiesIsRefused) {
  make_ready();
  loader_.control().pool.kv_blocks = 1'000'000;
  wires_->send(planner().next().tables);
  EXPECT_THAT(next(Body::Rejected).body.AsRejected()->sentence,
              HasSubstr("the pool in the control segment is none"));
}

TEST_F(ExecutorTest, AcksAreCumulative) {
  make_ready();
  const Planned planned = planner().next();
  wires_->send(planned.tables);
  wires_->send(planned.orders[0]);
  const std::uint64_t last = wires_->send(planned.orders[1]);
  EXPECT_EQ(next(Body::Ack).body.AsAck()->seq, last);
}

TEST_F(ExecutorTest, StopFinishesWhatIsQueued) {
  make_ready();
  const Planned planned = planner().next();
  wires_->send(planned.tables);
  for (const auto& order : planned.orders) {
    wires_->send(order);
  }
  wires_->send(messages::StopT());
  while (executor_->step()) {
  }
  std::vector<Body> said;
  while (auto message = wires_->take()) {
    said.push_back(message->body.type);
  }
  EXPECT_EQ(std::ranges::count(said, Body::LayerDone), 5);
  EXPECT_EQ(said.back(), Body::IterationDone);
  EXPECT_FALSE(executor_->step());
}

TEST_F(ExecutorTest, ANewPlannerIsGreetedAnewAndBeginsFromTheStart) {
  make_ready();
  const Planned planned = planner().next();
  wires_->send(planned.tables);
  wires_->send(planned.orders[0]);
  wires_->send(planned.orders[1]);
  next(Body::Ack);
  wires_->connected = false;
  for (int step = 0; step < 10; ++step) {
    executor_->step();
  }
  wires_->to_planner.clear();
  wires_->seq = 0;
  wires_->connected = true;
  next(Body::Hello);
  wires_->send(configure(), 2);
  next(Body::Ready);
  const Said said = run(planner().next());
  EXPECT_EQ(said.layers.size(), 5u);
}

TEST_F(ExecutorTest, APlannerThatTookAnothersPlaceUnseenIsGreeted) {
  make_ready();
  const Planned planned = planner().next();
  wires_->send(planned.tables);
  next(Body::Ack);
  ++wires_->connections;  // both while the executor was busy elsewhere
  wires_->seq = 0;
  next(Body::Hello);
  wires_->send(configure(), 2);
  next(Body::Ready);
  const Said said = run(planner().next());
  EXPECT_EQ(said.layers.size(), 5u);
}

TEST_F(ExecutorTest, ProgressIsSeenInTheControlSegment) {
  const auto steps = [&] {
    return loader_.control().progress[static_cast<int>(Process::gpu_executor)].steps.load(
        std::memory_order_relaxed);
  };
  make_ready();
  const std::uint64_t before = steps();
  executor_->step();
  EXPECT_EQ(steps(), before) << "nothing happened";
  run(planner().next());
  EXPECT_GT(steps(), before + 4);
}

TEST_F(ExecutorTest, ADeviceThatFailsEndsTheProcessWithASentence) {
  make_ready();
  std::vector<float> numbers(64);
  device_->launch(Gemm{.out = {.data = numbers.data(), .stride = 1},
                       .in = {.data = numbers.data(), .stride = 2},
                       .weight = {.data = numbers.data(), .rows = 16, .cols = 2},
                       .rows = 1});
  const Planned planned = planner().next();
  wires_->send(planned.tables);
  wires_->send(planned.orders[0]);
  try {
    for (int step = 0; step < 10'000; ++step) {
      executor_->step();
    }
    FAIL() << "it went on";
  } catch (const Failure& failure) {
    EXPECT_EQ(failure.code(), Exit::device_failed);
    EXPECT_THAT(failure.what(), HasSubstr("the device cpu, 1 thread failed"));
  }
}

}  // namespace
}  // namespace poise::test
