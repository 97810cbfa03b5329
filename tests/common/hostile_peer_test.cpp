// A channel beside peers that break its rules: bytes that are cut or damaged, floods, and a peer that never reads.

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <span>
#include <string>
#include <vector>
#include <zmq.hpp>

#include "common/channel.h"
#include "common/trouble.h"

namespace poise {
namespace {

using RawBytes = std::vector<std::byte>;
const Identity kRun{.run_id = "abc123", .layout_hash = 77};
constexpr Seconds kPatience{10};

messages::HelloT greeting_of(const Identity& identity) {
  messages::HelloT greeting;
  greeting.protocol = kProtocol;
  greeting.build = build_id();
  greeting.layout_hash = identity.layout_hash;
  return greeting;
}

messages::IterationT tables_of_two_requests() {
  messages::IterationT tables;
  tables.iteration = 7;
  auto batch = std::make_unique<messages::MiniBatchT>();
  batch->tokens = {5, 6, 7};
  batch->sequences = {messages::Sequence(1, 0, 2, 0, 0), messages::Sequence(2, 16, 1, 2, 1)};
  batch->loads = {messages::BlockRun(messages::Kind::Kv, messages::Place::Host, 16, 1, 3, 0)};
  batch->samples.push_back(std::make_unique<messages::SampleT>());
  batch->samples.back()->prompt_targets = {1, 2};
  tables.mini_batches.push_back(std::move(batch));
  return tables;
}

// A peer that sends whatever bytes it likes.
class RawPeer {
 public:
  explicit RawPeer(const std::filesystem::path& path)
      : socket_(context_, zmq::socket_type::dealer) {
    socket_.set(zmq::sockopt::linger, 0);
    socket_.connect("ipc://" + path.string());
  }
  void send(std::span<const std::byte> bytes) {
    socket_.send(zmq::const_buffer(bytes.data(), bytes.size()), zmq::send_flags::none);
  }

 private:
  zmq::context_t context_;
  zmq::socket_t socket_;
};

class HostilePeer : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = "/tmp/poise-peer-XXXXXX";
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    folder_ = name;
    path_ = folder_ / "test.sock";
    capture();
    server_ = serve(path_, kRun);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  // A Hello and what follows it, byte for byte as an honest client sends them.
  void capture() {
    const auto path = folder_ / "honest.sock";
    const auto server = serve(path, kRun);
    const auto client = connect(path, kRun);
    while (!send(*client, greeting_of(kRun), &hello_)) {
      usleep(1000);
    }
    ASSERT_TRUE(server->receive(kPatience));
    ASSERT_TRUE(send(*client, tables_of_two_requests(), &tables_));
    ASSERT_TRUE(server->receive(kPatience));
  }

  std::filesystem::path folder_, path_;
  RawBytes hello_, tables_;
  std::unique_ptr<Channel> server_;
};

TEST_F(HostilePeer, EveryCutOfAMessageIsRefused) {
  RawPeer peer(path_);
  constexpr std::size_t kPadding = 8;  // at the end of a message, at most
  for (std::size_t size = 0; size + kPadding <= tables_.size(); ++size) {
    peer.send(hello_);
    ASSERT_TRUE(server_->receive(kPatience)) << "after a message cut to " << size << " bytes";
    peer.send(std::span(tables_).first(size));
    EXPECT_THROW(server_->receive(kPatience), Failure)
        << size << " of " << tables_.size() << " bytes";
  }
  peer.send(hello_);
  ASSERT_TRUE(server_->receive(kPatience));
  peer.send(tables_);
  const auto whole = server_->receive(kPatience);
  ASSERT_TRUE(whole);
  EXPECT_EQ((*whole)->body_as_Iteration()->iteration(), 7u);
}

TEST_F(HostilePeer, ABodysTypeWithoutABodyIsRefused) {
  for (const messages::Body type : messages::EnumValuesBody()) {
    flatbuffers::FlatBufferBuilder builder;
    const auto run = builder.CreateString(kRun.run_id);
    messages::MessageBuilder message(builder);
    message.add_seq(2);
    message.add_run_id(run);
    message.add_body_type(type);
    messages::FinishMessageBuffer(builder, message.Finish());
    const auto bytes = std::as_bytes(std::span(builder.GetBufferPointer(), builder.GetSize()));
    EXPECT_EQ(message_in(bytes), nullptr) << messages::EnumNameBody(type);
    RawPeer peer(path_);
    peer.send(hello_);
    ASSERT_TRUE(server_->receive(kPatience));
    peer.send(bytes);
    EXPECT_THROW(server_->receive(kPatience), Failure) << messages::EnumNameBody(type);
  }
}

// A damaged byte can leave a sound message, with other numbers in it; what is handed out can be read to its end.
TEST_F(HostilePeer, EveryDamagedByteIsRefusedOrHarmless) {
  RawPeer peer(path_);
  int refused = 0;
  for (std::size_t at = 0; at < tables_.size(); ++at) {
    peer.send(hello_);
    ASSERT_TRUE(server_->receive(kPatience)) << "after damage at " << at;
    RawBytes damaged = tables_;
    damaged[at] ^= std::byte{0xff};
    peer.send(damaged);
    peer.send(hello_);  // what is dropped without a word is not waited for
    try {
      const auto found = server_->receive(kPatience);
      ASSERT_TRUE(found);
      const std::unique_ptr<messages::MessageT> read((*found)->UnPack());
      if (read->body.type != messages::Body::Hello) {
        ASSERT_TRUE(server_->receive(kPatience));
      }
    } catch (const Failure&) {
      ++refused;
      ASSERT_TRUE(server_->receive(kPatience));
    }
  }
  EXPECT_GT(refused, 10);
}

TEST_F(HostilePeer, AFloodOfGreetingsLeavesTheLastOneServed) {
  RawPeer peer(path_);
  constexpr int kGreetings = 5000;
  for (int i = 0; i < kGreetings; ++i) {
    peer.send(hello_);
    ASSERT_TRUE(server_->receive(kPatience)) << i;
  }
  EXPECT_EQ(server_->connections(), kGreetings);
  const auto client = connect(path_, kRun);
  while (!send(*client, greeting_of(kRun))) {
    usleep(1000);
  }
  ASSERT_TRUE(server_->receive(kPatience));
  ASSERT_TRUE(send(*client, messages::AckT{{}, 3}));
  const auto ack = server_->receive(kPatience);
  ASSERT_TRUE(ack);
  EXPECT_EQ((*ack)->body_as_Ack()->seq(), 3u);
}

// Its queue is bounded: who sends is told, does not wait, and nothing that was taken is lost.
TEST_F(HostilePeer, APeerThatNeverReadsHoldsNobodyUp) {
  const auto client = connect(path_, kRun);
  while (!send(*client, greeting_of(kRun))) {
    usleep(1000);
  }
  ASSERT_TRUE(server_->receive(kPatience));
  std::uint64_t taken = 0;
  constexpr std::uint64_t kMost = 1'000'000;
  while (taken < kMost && send(*server_, messages::AckT{{}, taken})) {
    ++taken;
  }
  ASSERT_LT(taken, kMost) << "a queue without an end";
  for (std::uint64_t i = 0; i < taken; ++i) {
    const auto ack = client->receive(kPatience);
    ASSERT_TRUE(ack) << i << " of " << taken;
    ASSERT_EQ((*ack)->body_as_Ack()->seq(), i);
  }
}

}  // namespace
}  // namespace poise
