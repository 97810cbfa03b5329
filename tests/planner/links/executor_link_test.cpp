#include "planner/links/executor_link.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "common/trouble.h"
#include "tests/support/model_files.h"
#include "tests/support/small_shape.h"

namespace poise {
namespace {

const Identity kIdentity{.run_id = "abc123", .layout_hash = 5};

messages::HelloT hello_of_an_executor() {
  messages::HelloT hello;
  hello.protocol = kProtocol;
  hello.build = build_id();
  hello.layout_hash = kIdentity.layout_hash;
  hello.device = "test";
  hello.device_kind = messages::DeviceKind::Cpu;
  hello.device_memory = 1;
  return hello;
}

// An executor that is slow to read: greets, is away for a while, then reads until it is told to end.
std::string last_word_to_a_slow_reader(const std::string& socket) {
  const auto channel = connect(socket, kIdentity);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(5);
  const messages::HelloT hello = hello_of_an_executor();
  while (!send(*channel, messages::HelloT(hello)) && std::chrono::steady_clock::now() < end) {
    channel->receive({0.001});
  }
  usleep(100'000);
  while (std::chrono::steady_clock::now() < end) {
    try {
      channel->receive({0.01});
    } catch (const Failure& told) {  // a Stop before anything else is a refusal
      return told.what();
    }
  }
  return "none";
}

TEST(ExecutorLink, ThatDoesNotNameItsKindOfDeviceIsRefused) {
  const testing_support::TempDirectory folder;
  const std::string socket = folder.path() / "e.sock";
  OrderLog log(folder.path() / "orders.log", "{}");
  ExecutorLink link(serve(socket, kIdentity), log, 2, BlockSizes{});
  const auto executor = connect(socket, kIdentity);
  messages::HelloT hello = hello_of_an_executor();
  hello.device_kind = {};
  hello.device = "a fine one";
  while (!send(*executor, messages::HelloT(hello))) {
    executor->receive({0.001});
  }
  try {
    while (!link.greeting()) {
      link.step({0.01});
    }
    ADD_FAILURE() << "it was greeted";
  } catch (const Failure& refusal) {
    EXPECT_EQ(refusal.code(), Exit::foreign);
    EXPECT_NE(std::string(refusal.what()).find("kind of its device 'a fine one'"),
              std::string::npos)
        << refusal.what();
  }
}

TEST(ExecutorLink, OrdersFetchWeightsWhenTheLinkIsIdle) {
  constexpr std::int32_t kLayers = 4;
  const testing_support::TempDirectory folder;
  const std::string socket = folder.path() / "e.sock";
  OrderLog log(folder.path() / "orders.log", "{}");
  ExecutorLink link(serve(socket, kIdentity), log, kLayers, BlockSizes{});
  const auto executor = connect(socket, kIdentity);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  const auto in_time = [&] { return std::chrono::steady_clock::now() < end; };
  while (in_time() && !send(*executor, hello_of_an_executor())) {
    executor->receive({0.001});
  }
  while (in_time() && !link.greeting()) {
    link.step({0.01});
  }
  ASSERT_TRUE(link.greeting());
  const WeightLayout layout = weight_layout(testing_support::small_shape(kLayers), DType::float16);
  link.configure({.resident_layers = 0}, {1}, layout, false);
  ASSERT_TRUE(send(*executor, messages::ReadyT{.credits = kLayers + 2}));
  while (in_time() && !link.ready()) {
    link.step({0.01});
  }
  ASSERT_TRUE(link.ready());
  messages::IterationT tables;
  tables.mini_batches.resize(3);
  for (auto& batch : tables.mini_batches) {
    batch = std::make_unique<messages::MiniBatchT>();
  }
  link.begin(std::move(tables), false, {.behind = {{0}, {1}, {0}}, .weights = {1}});
  std::vector<std::uint32_t> places;  // of layer 2's, while layer 1 is computed
  for (std::uint32_t stage = 0; in_time() && stage < kLayers + 1;) {
    link.step({0});
    const auto message = executor->receive({0.01});
    const auto* order = message ? (*message)->body_as_LayerOrder() : nullptr;
    stage = order != nullptr ? order->stage() : stage;
    if (order != nullptr && stage == 2) {
      for (const messages::WeightFetch* fetch : *order->fetch()) {
        places.push_back(fetch->after_mini_batch());
      }
    }
  }
  EXPECT_EQ(places, std::vector<std::uint32_t>(layout.layer.pieces.size(), 1));
}

TEST(ExecutorLink, ItsLastWordIsReadBeforeItLeaves) {
  std::string folder = "/tmp/poise-link-XXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  std::string heard;
  std::thread executor;
  {
    OrderLog log(folder + "/orders.log", "{}");
    ExecutorLink link(serve(folder + "/executor.sock", kIdentity), log, 1, BlockSizes{});
    executor = std::thread([&] { heard = last_word_to_a_slow_reader(folder + "/executor.sock"); });
    while (!link.greeting()) {
      link.step({0.01});
    }
    link.stop("all is done");
  }
  executor.join();
  EXPECT_EQ(heard, "all is done");
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace poise
