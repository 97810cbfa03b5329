#include "planner/links/executor_link.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <thread>

#include "common/trouble.h"
#include "tests/support/model_files.h"

namespace poise {
namespace {

const Identity kIdentity{.run_id = "abc123", .layout_hash = 5};

// An executor that is slow to read: greets, is away for a while, then reads until it is told to end.
std::string last_word_to_a_slow_reader(const std::string& socket) {
  const auto channel = connect(socket, kIdentity);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(5);
  messages::HelloT hello;
  hello.protocol = kProtocol;
  hello.build = build_id();
  hello.layout_hash = kIdentity.layout_hash;
  hello.device = "test";
  hello.device_kind = messages::DeviceKind::Cpu;
  hello.device_memory = 1;
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
  messages::HelloT hello;
  hello.protocol = kProtocol;
  hello.build = build_id();
  hello.layout_hash = kIdentity.layout_hash;
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
