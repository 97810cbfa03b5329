#include "planner/links/executor_link.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <thread>

#include "common/trouble.h"

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
