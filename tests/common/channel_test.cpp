#include "common/channel.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <functional>
#include <random>
#include <zmq.hpp>

#include "common/trouble.h"

namespace poise {
namespace {

namespace fs = std::filesystem;
using messages::Body;

constexpr Seconds kSoon{2.0};
const Identity kIdentity{.run_id = "abc123", .layout_hash = 77};

messages::HelloT hello() {
  messages::HelloT greeting;
  greeting.protocol = kProtocol;
  greeting.build = build_id();
  greeting.layout_hash = kIdentity.layout_hash;
  return greeting;
}

// Receives on `channel` until something arrives or the time is over.
std::optional<Received> next(Channel& channel, Seconds timeout = kSoon) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout.n);
  while (std::chrono::steady_clock::now() < end) {
    if (auto message = channel.receive({0.02})) {
      return message;
    }
  }
  return std::nullopt;
}

bool eventually(const std::function<bool()>& condition) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(kSoon.n);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) {
      return false;
    }
    usleep(1000);
  }
  return true;
}

class ChannelTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = "/tmp/poise-channel-XXXXXX";
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    folder_ = name;
    path_ = folder_ / "test.sock";
  }
  void TearDown() override { fs::remove_all(folder_); }

  // A connected pair: the client said Hello, the server took it.
  void meet() {
    server_ = serve(path_, kIdentity);
    client_ = connect(path_, kIdentity);
    greet();
  }

  void greet() {
    ASSERT_TRUE(eventually([&] { return send(*client_, hello()); }));
    const auto greeting = next(*server_);
    ASSERT_TRUE(greeting);
    ASSERT_EQ((*greeting)->body_type(), Body::Hello);
  }

  fs::path folder_, path_;
  std::unique_ptr<Channel> server_, client_;
};

TEST_F(ChannelTest, MessagesArriveInOrderBothWays) {
  meet();
  for (std::uint64_t i = 1; i <= 50; ++i) {
    ASSERT_TRUE(send(*server_, messages::LayerOrderT{{}, i}));
    ASSERT_TRUE(send(*client_, messages::AckT{{}, i}));
  }
  for (std::uint64_t i = 1; i <= 50; ++i) {
    const auto order = next(*client_);
    ASSERT_TRUE(order);
    EXPECT_EQ((*order)->body_as_LayerOrder()->iteration(), i);
    const auto ack = next(*server_);
    ASSERT_TRUE(ack);
    EXPECT_EQ((*ack)->body_as_Ack()->seq(), i);
  }
}

TEST_F(ChannelTest, NothingIsQueuedForAPeerThatIsNotThere) {
  server_ = serve(path_, kIdentity);
  EXPECT_FALSE(send(*server_, messages::StopT{}));
  const auto lonely = connect(folder_ / "absent.sock", kIdentity);
  usleep(50'000);
  EXPECT_FALSE(send(*lonely, hello()));
}

TEST_F(ChannelTest, APeerThatWentAwayIsNoticedWhenSendingToIt) {
  meet();
  client_.reset();
  EXPECT_TRUE(eventually([&] { return !send(*server_, messages::StopT{}); }));
}

TEST_F(ChannelTest, ANewServerStartsCountingAnewOnceTheClientGreetsIt) {
  meet();
  ASSERT_TRUE(send(*client_, messages::AckT{{}, 1}));
  ASSERT_TRUE(next(*server_));
  server_.reset();
  ASSERT_TRUE(eventually([&] {
    client_->receive({0.01});
    return !client_->connected();
  }));
  server_ = serve(path_, kIdentity);
  greet();
  ASSERT_TRUE(send(*server_, messages::LayerOrderT{{}, 9}));
  const auto order = next(*client_);
  ASSERT_TRUE(order);
  EXPECT_EQ((*order)->seq(), 1u);
}

TEST_F(ChannelTest, AnotherConnectionIsSeenAlsoByWhoDidNotLookMeanwhile) {
  meet();
  EXPECT_EQ(client_->connections(), 1u);
  EXPECT_EQ(server_->connections(), 1u);
  server_.reset();
  server_ = serve(path_, kIdentity);
  ASSERT_TRUE(eventually([&] {
    client_->receive({0.01});
    return client_->connected() && client_->connections() == 2;
  }));
  greet();
  EXPECT_EQ(server_->connections(), 1u);
}

TEST_F(ChannelTest, ANewerHelloReplacesTheOlderPeer) {
  meet();
  auto second = connect(path_, kIdentity);
  ASSERT_TRUE(eventually([&] { return send(*second, hello()); }));
  ASSERT_TRUE(next(*server_));
  ASSERT_TRUE(send(*client_, messages::AckT{{}, 1}));  // the older one talks on
  ASSERT_TRUE(send(*second, messages::AckT{{}, 2}));
  const auto ack = next(*server_);
  ASSERT_TRUE(ack);
  EXPECT_EQ((*ack)->body_as_Ack()->seq(), 2u);
}

struct Disagreement {
  const char* name;
  std::function<void(messages::HelloT&)> change;
};

TEST_F(ChannelTest, AHelloThatDisagreesIsRefusedWithASentenceAndTheServerGoesOn) {
  const std::vector<Disagreement> cases{
      {"protocol", [](auto& greeting) { greeting.protocol = 99; }},
      {"build", [](auto& greeting) { greeting.build = "another"; }},
      {"layout", [](auto& greeting) { greeting.layout_hash = 1; }}};
  server_ = serve(path_, kIdentity);
  for (const Disagreement& disagreement : cases) {
    auto stranger = connect(path_, kIdentity);
    auto greeting = hello();
    disagreement.change(greeting);
    ASSERT_TRUE(eventually([&] { return send(*stranger, messages::HelloT(greeting)); }));
    EXPECT_FALSE(next(*server_, {0.1})) << disagreement.name;
    try {
      next(*stranger);
      FAIL() << "no refusal for " << disagreement.name;
    } catch (const Failure& failure) {
      EXPECT_EQ(failure.code(), Exit::foreign);
      EXPECT_NE(std::string(failure.what()).find(disagreement.name), std::string::npos)
          << failure.what();
    }
  }
  client_ = connect(path_, kIdentity);
  greet();
}

TEST_F(ChannelTest, AHelloOfAnotherRunIsRefused) {
  server_ = serve(path_, kIdentity);
  auto stranger = connect(path_, {.run_id = "other", .layout_hash = 77});
  ASSERT_TRUE(eventually([&] { return send(*stranger, hello()); }));
  EXPECT_FALSE(next(*server_, {0.1}));
  EXPECT_THROW(next(*stranger), Failure);
}

TEST_F(ChannelTest, ARefusedPeerDoesNotReplaceThePresentOne) {
  meet();
  ASSERT_TRUE(send(*server_, messages::LayerOrderT{{}, 1}));
  auto stranger = connect(path_, {.run_id = "other", .layout_hash = 77});
  ASSERT_TRUE(eventually([&] { return send(*stranger, hello()); }));
  EXPECT_FALSE(next(*server_, {0.1}));
  EXPECT_THROW(next(*stranger), Failure);
  ASSERT_TRUE(send(*client_, messages::AckT{{}, 1}));
  const auto ack = next(*server_);
  ASSERT_TRUE(ack);
  EXPECT_EQ((*ack)->body_as_Ack()->seq(), 1u);
  ASSERT_TRUE(send(*server_, messages::LayerOrderT{{}, 2}));
  for (std::uint64_t i = 1; i <= 2; ++i) {
    const auto order = next(*client_);
    ASSERT_TRUE(order);
    EXPECT_EQ((*order)->body_as_LayerOrder()->iteration(), i);
  }
}

TEST_F(ChannelTest, AMessageOfAnOlderEpochIsDropped) {
  meet();
  client_->set_epochs({.planner = 1, .executor = 5});
  ASSERT_TRUE(send(*client_, messages::AckT{{}, 1}));
  server_->set_epochs({.planner = 2, .executor = 5});
  EXPECT_FALSE(next(*server_, {0.1}));
}

TEST_F(ChannelTest, AnEpochAfterTheHighestIsTheFirstAgain) {
  server_ = serve(path_, kIdentity);
  server_->set_epochs({.planner = 0xffff'ffff, .executor = 0xffff'fff0});
  client_ = connect(path_, kIdentity);
  client_->set_epochs({.planner = 0, .executor = 5});  // an executor that started after it
  greet();
  server_->set_epochs({.planner = 0xffff'ffff, .executor = 5});
  ASSERT_TRUE(send(*server_, messages::AckT{{}, 1}));
  ASSERT_TRUE(next(*client_));
  server_->set_epochs({.planner = 2, .executor = 5});
  client_->set_epochs({.planner = 0xffff'ffff, .executor = 5});  // a planner's before it
  ASSERT_TRUE(send(*client_, messages::AckT{{}, 1}));
  EXPECT_FALSE(next(*server_, {0.1}));
}

TEST_F(ChannelTest, AGapInTheNumbersIsRefused) {
  meet();
  client_->set_epochs({.planner = 1, .executor = 1});
  server_->set_epochs({.planner = 2, .executor = 1});
  ASSERT_TRUE(
      send(*client_, messages::AckT{{}, 1}));  // dropped as stale, so the next one follows a gap
  EXPECT_FALSE(next(*server_, {0.1}));
  client_->set_epochs({.planner = 2, .executor = 1});
  ASSERT_TRUE(send(*client_, messages::AckT{{}, 2}));
  EXPECT_THROW(next(*server_), Failure);
}

TEST_F(ChannelTest, NoiseOfAStrangerDoesNotDisturbTheServer) {
  meet();
  zmq::context_t context;
  zmq::socket_t noisy(context, zmq::socket_type::dealer);
  noisy.set(zmq::sockopt::linger, 0);
  noisy.connect("ipc://" + path_.string());
  std::mt19937 random(1);
  for (int i = 0; i < 200; ++i) {
    std::string noise(random() % 300, '\0');
    for (char& byte : noise) {
      byte = static_cast<char>(random());
    }
    noisy.send(zmq::buffer(noise), zmq::send_flags::none);
  }
  ASSERT_TRUE(send(*client_, messages::AckT{{}, 3}));
  const auto ack = next(*server_);
  ASSERT_TRUE(ack);
  EXPECT_EQ((*ack)->body_as_Ack()->seq(), 3u);
}

TEST_F(ChannelTest, ASentMessageIsHandedBackAsItWasSent) {
  meet();
  std::vector<std::byte> sent;
  ASSERT_TRUE(send(*server_, messages::LayerOrderT{{}, 4}, &sent));
  const auto order = next(*client_);
  ASSERT_TRUE(order);
  EXPECT_TRUE(std::ranges::equal(sent, order->bytes()));
}

TEST_F(ChannelTest, AMessageThatNoPeerTakesIsASentenceAndTheConnectionStays) {
  meet();
  EXPECT_THROW(send(*server_, messages::StopT{.reason = std::string(64 << 20, 'x')}), Failure);
  ASSERT_TRUE(send(*server_, messages::AckT{.seq = 3}));
  const auto ack = next(*client_);
  ASSERT_TRUE(ack);
  EXPECT_EQ((*ack)->body_as_Ack()->seq(), 3u);
}

TEST_F(ChannelTest, FramesPassAgainAfterOneThatWasTooLarge) {
  zmq::context_t context;
  zmq::socket_t front(context, zmq::socket_type::router);
  front.set(zmq::sockopt::linger, 0);
  front.set(zmq::sockopt::rcvtimeo, 2000);
  front.bind("ipc://" + path_.string());
  const auto frames = connect_frames(path_, kKiB);
  const std::vector<std::string> hello{"hello"};
  zmq::message_t sender, text;
  const auto heard = [&] {
    frames->receive({0});
    return frames->send(hello) && front.recv(sender, zmq::recv_flags::none) &&
           front.recv(text, zmq::recv_flags::none) && text.to_string() == "hello";
  };
  ASSERT_TRUE(eventually(heard));
  EXPECT_EQ(frames->ended(), 0u);
  front.send(sender, zmq::send_flags::sndmore);
  front.send(zmq::buffer(std::string(1025, 'x')), zmq::send_flags::none);
  ASSERT_TRUE(eventually([&] { return frames->receive({0.01}).empty() && frames->ended() == 1; }));
  ASSERT_TRUE(eventually(heard));
  front.send(sender, zmq::send_flags::sndmore);
  front.send(zmq::buffer(std::string(1024, 'x')), zmq::send_flags::none);
  EXPECT_TRUE(eventually([&] { return frames->receive({0.01}).size() == 1; }));
}

TEST_F(ChannelTest, OnlyThisUserMayConnect) {
  server_ = serve(path_, kIdentity);
  struct stat status {};
  ASSERT_EQ(stat(path_.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777u, 0600u);
}

TEST(ChannelPaths, APathThatIsTooLongIsASentence) {
  EXPECT_THROW(serve("/tmp/" + std::string(200, 'x'), kIdentity), Failure);
  EXPECT_THROW(connect("/tmp/" + std::string(200, 'x'), kIdentity), Failure);
}

}  // namespace
}  // namespace poise
