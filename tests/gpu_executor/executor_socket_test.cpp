// The executor over a real socket, where a planner comes, goes and comes again.

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>

#include "common/process.h"
#include "gpu_executor/executor.h"
#include "tests/gpu_executor/loopback.h"
#include "tests/gpu_executor/pipeline_run.h"

namespace poise::test {
namespace {

class ExecutorSocket : public testing::Test {
 protected:
  ExecutorSocket() {
    open_log("test", "");  // nothing
    std::string folder = std::filesystem::temp_directory_path() / "poise-executor-XXXXXX";
    EXPECT_NE(mkdtemp(folder.data()), nullptr);
    folder_ = folder;
    loader_.seal();
    pool_ = loader_.make_pool(64, 64);
    executor_ = std::make_unique<Executor>(
        ExecutorOptions{.run_id = loader_.run_id}, open_cpu_device(setting_.device),
        [this](const Identity& identity) { return connect(socket(), identity); });
  }
  ~ExecutorSocket() override {
    executor_.reset();
    std::filesystem::remove_all(folder_);
  }

  std::string socket() const { return folder_ / "executor.sock"; }

  std::unique_ptr<Channel> planner(std::uint32_t epoch) const {
    auto channel = serve(socket(), {.run_id = loader_.run_id, .layout_hash = model_.layout.hash()});
    channel->set_epochs({.planner = epoch, .executor = 0});
    return channel;
  }

  // What the planner hears next, Acks aside; the executor steps meanwhile.
  std::optional<Received> next(Channel& planner) {
    for (int step = 0; step < 1000; ++step) {
      executor_->step();
      while (auto message = planner.receive({0})) {
        if (message->operator*().body_type() != messages::Body::Ack) {
          return message;
        }
      }
    }
    ADD_FAILURE() << "the executor says nothing";
    return std::nullopt;
  }
  void expect(Channel& planner, messages::Body type) {
    const auto message = next(planner);
    ASSERT_TRUE(message.has_value());
    EXPECT_EQ((*message)->body_type(), type) << messages::EnumNameBody((*message)->body_type());
  }

  void expect_an_iteration(Channel& planner) {
    expect(planner, messages::Body::Hello);
    const DeviceLimits& limits = setting_.limits;
    messages::ConfigureT configure;
    configure.resident_layers = limits.resident_layers;
    configure.max_rows = limits.max_rows;
    configure.max_mini_batch_rows = limits.max_mini_batch_rows;
    configure.max_sequences = limits.max_sequences;
    configure.act_slots = limits.act_slots;
    configure.kv_slots = limits.kv_slots;
    configure.logits_rows = limits.logits_rows;
    configure.max_context = limits.max_context;
    EXPECT_TRUE(send(planner, std::move(configure)));
    expect(planner, messages::Body::Ready);
    Planned planned = SmallPlanner(plan_, model_.layout, limits, pool_).next();
    EXPECT_TRUE(send(planner, std::move(planned.tables)));
    for (auto& order : planned.orders) {
      EXPECT_TRUE(send(planner, std::move(order)));
    }
    for (std::size_t stage = 0; stage < planned.orders.size(); ++stage) {
      expect(planner, messages::Body::LayerDone);
    }
    expect(planner, messages::Body::IterationDone);
  }

  const TinyModel model_{tiny_shape(), DType::float32, 31};
  const Setting setting_;
  const Plan plan_{.sequences = random_sequences(model_.shape, {20, 30}, 1), .kind = mixed};
  HandmadeLoader loader_{model_};
  PoolPartition pool_{};
  std::filesystem::path folder_;
  std::unique_ptr<Executor> executor_;
};

TEST_F(ExecutorSocket, APlannerThatRestartsFindsTheExecutorReady) {
  auto first = planner(1);
  expect_an_iteration(*first);
  first.reset();
  for (int step = 0; step < 5; ++step) {
    executor_->step();
  }
  auto second = planner(2);
  expect_an_iteration(*second);
}

TEST_F(ExecutorSocket, APlannerThatComesLateIsWaitedFor) {
  for (int step = 0; step < 3; ++step) {
    EXPECT_TRUE(executor_->step());
  }
  auto late = planner(1);
  expect_an_iteration(*late);
}

}  // namespace
}  // namespace poise::test
