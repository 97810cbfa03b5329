#include "common/channel.h"

#include <sys/stat.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>
#include <zmq.hpp>

#include "common/testing/failpoint.h"
#include "common/trouble.h"
#include "common/words.h"

namespace poise {
namespace {

constexpr int kQueueLimit = 4096;  // messages; credits keep real queues far shorter

messages::HelloT hello_of(const messages::Message& message) {
  messages::HelloT hello;
  message.body_as_Hello()->UnPackTo(&hello);
  return hello;
}

// Whether an epoch is of an earlier start than the one known, if any. Both follow the machine's uptime, and
// begin anew after 2^32 of its steps: an executor's after 50 days.
bool precedes(std::uint32_t epoch, std::uint32_t known) {
  return epoch != 0 && known != 0 && static_cast<std::int32_t>(epoch - known) < 0;
}

bool wait_for(zmq::pollitem_t* items, std::size_t count, Seconds timeout) {
  try {
    return zmq::poll(
               items, count,
               std::chrono::milliseconds(static_cast<std::int64_t>(timeout.n * 1e3 + 0.5))) > 0;
  } catch (const zmq::error_t& error) {
    if (error.num() == EINTR) {
      return false;
    }
    throw;
  }
}

// What both kinds of channel share: packing and checking messages.
class CommonChannel : public Channel {
 public:
  CommonChannel(zmq::socket_type type, std::string path, Identity identity)
      : socket_(context_, type), path_(std::move(path)), identity_(std::move(identity)) {
    socket_.set(zmq::sockopt::linger, 0);
    socket_.set(zmq::sockopt::maxmsgsize, kMaxMessage.n);
    socket_.set(zmq::sockopt::handshake_ivl, 1000);
    socket_.set(zmq::sockopt::sndhwm, kQueueLimit);
    socket_.set(zmq::sockopt::rcvhwm, kQueueLimit);
  }

  void set_epochs(Epochs epochs) override { epochs_ = epochs; }
  Epochs epochs() const override { return epochs_; }

 protected:
  std::string endpoint() const { return "ipc://" + path_; }

  flatbuffers::DetachedBuffer pack(messages::BodyUnion body) const {
    messages::MessageT message;
    message.seq = sent_ + 1;
    message.planner_epoch = epochs_.planner;
    message.executor_epoch = epochs_.executor;
    message.run_id = identity_.run_id;
    message.body = std::move(body);
    flatbuffers::FlatBufferBuilder builder(4096);
    messages::FinishMessageBuffer(builder, messages::Message::Pack(builder, &message));
    if (builder.GetSize() > kMaxMessage.n) {  // its receiver would close the connection for good
      fail(Exit::internal, "a message of {} on {} is larger than the largest, {}: a defect of poise",
           size_text(Bytes{builder.GetSize()}), path_, size_text(kMaxMessage));
    }
    return builder.Release();
  }

  // Gives a numbered message to ZeroMQ by `put`, unless a failpoint loses, repeats or delays it. False where
  // ZeroMQ does not take it.
  template <typename Put>
  bool pass_on(const flatbuffers::DetachedBuffer& packed, const Put& put) {
    const Fault::Kind fault = failpoint("channel.send").kind;
    if (fault == Fault::Kind::error) {
      return false;
    }
    if (fault == Fault::Kind::drop) {
      return true;
    }
    if (fault == Fault::Kind::reorder) {
      delayed_.assign(packed.data(), packed.data() + packed.size());
      return true;
    }
    if (!put(packed.data(), packed.size()) ||
        (fault == Fault::Kind::duplicate && !put(packed.data(), packed.size()))) {
      return false;
    }
    const auto delayed = std::exchange(delayed_, {});
    return delayed.empty() || put(delayed.data(), delayed.size());
  }

  // Whether a failpoint loses the frame that was received.
  static bool lost() { return failpoint("channel.receive").kind == Fault::Kind::drop; }

  void count_sent(const flatbuffers::DetachedBuffer& packed, std::vector<std::byte>* sent) {
    ++sent_;
    if (sent != nullptr) {
      const auto* bytes = reinterpret_cast<const std::byte*>(packed.data());
      sent->assign(bytes, bytes + packed.size());
    }
  }

  // A copy of the frame that is known to be a message; FlatBuffers wants its buffers aligned.
  Received verified(const zmq::message_t& frame) const {
    const auto* begin = frame.data<std::byte>();
    std::vector<std::byte> bytes(begin, begin + frame.size());
    const messages::Message* message = message_in(bytes);
    if (message == nullptr) {
      fail(Exit::foreign, "a message of {} bytes on {} is not one of poise", frame.size(), path_);
    }
    if (message->run_id() == nullptr) {
      fail(Exit::foreign, "a message on {} has no run id", path_);
    }
    return Received(std::move(bytes));
  }

  bool stale(const messages::Message& message) const {
    return precedes(message.planner_epoch(), epochs_.planner) ||
           precedes(message.executor_epoch(), epochs_.executor);
  }

  void expect_next(const messages::Message& message) {
    if (message.seq() != received_ + 1) {
      fail(Exit::interrupted, "message {} on {} came after {}: messages were lost", message.seq(),
           path_, received_);
    }
    received_ = message.seq();
  }

  zmq::context_t context_{1};
  zmq::socket_t socket_;
  std::string path_;
  Identity identity_;
  Epochs epochs_;
  std::uint64_t sent_ = 0;
  std::uint64_t received_ = 0;
  std::vector<std::uint8_t> delayed_;  // by a failpoint; empty: none
};

class ServerChannel final : public CommonChannel {
 public:
  ServerChannel(const std::string& path, const Identity& identity)
      : CommonChannel(zmq::socket_type::router, path, identity) {
    socket_.set(zmq::sockopt::router_mandatory, 1);
    try {
      socket_.bind(endpoint());
    } catch (const zmq::error_t& error) {
      fail("socket {} cannot be bound: {} (a path has at most 107 bytes)", path, error.what());
    }
    chmod(path.c_str(), 0600);
  }

  bool send(messages::BodyUnion body, std::vector<std::byte>* sent) override {
    if (!connected()) {
      return false;
    }
    const auto packed = pack(std::move(body));
    if (!pass_on(packed, [this](const void* data, std::size_t size) {
          return send_to(peer_, data, size);
        })) {
      return false;
    }
    count_sent(packed, sent);
    return true;
  }

  std::optional<Received> receive(Seconds timeout) override {
    zmq::pollitem_t item{socket_.handle(), 0, ZMQ_POLLIN, 0};
    if (!wait_for(&item, 1, timeout)) {
      return std::nullopt;
    }
    zmq::message_t sender, frame;
    if (!socket_.recv(sender, zmq::recv_flags::dontwait)) {
      return std::nullopt;
    }
    bool more = sender.more();
    int frames = 0;
    while (more && socket_.recv(frame, zmq::recv_flags::dontwait)) {
      more = frame.more();
      ++frames;
    }
    return frames == 1 && !lost() ? accept(sender.to_string(), frame) : std::nullopt;
  }

  bool connected() const override { return !peer_.empty(); }
  std::uint64_t connections() const override { return greeted_; }

 private:
  std::optional<Received> accept(const std::string& sender, const zmq::message_t& frame) {
    std::optional<Received> message;
    try {
      message = verified(frame);
    } catch (const Failure&) {
      if (sender == peer_) {
        throw;
      }
      return std::nullopt;  // a message that is not poise's does not end this run
    }
    if ((*message)->body_type() == messages::Body::Hello) {
      return greet(sender, std::move(*message));
    }
    if (sender != peer_ || stale(**message)) {
      return std::nullopt;
    }
    expect_next(**message);
    return message;
  }

  // An executor that served an earlier planner of this run still names that one's epoch; only an
  // older executor's Hello is none of ours.
  std::optional<Received> greet(const std::string& sender, Received message) {
    if (precedes(message->executor_epoch(), epochs_.executor)) {
      return std::nullopt;
    }
    const messages::HelloT hello = hello_of(*message);
    const std::string reason = disagreement(hello, message->run_id()->str());
    if (!reason.empty()) {
      refuse(sender, reason);
      return std::nullopt;
    }
    peer_ = sender;
    ++greeted_;
    sent_ = 0;
    received_ = message->seq();
    return message;
  }

  // A refused peer does not replace the present one.
  void refuse(const std::string& sender, const std::string& reason) {
    const std::uint64_t sent = std::exchange(sent_, 0);
    messages::BodyUnion body;
    body.Set(messages::StopT{.reason = reason});
    const auto packed = pack(std::move(body));
    send_to(sender, packed.data(), packed.size());
    sent_ = sent;
  }

  std::string disagreement(const messages::HelloT& hello, const std::string& run_id) const {
    if (hello.protocol != kProtocol) {
      return fmt::format("protocol {} meets protocol {}: both sides must be of one build",
                         hello.protocol, kProtocol);
    }
    if (hello.build != build_id()) {
      return fmt::format("build '{}' meets build '{}': both sides must be of one build",
                         hello.build, build_id());
    }
    if (run_id != identity_.run_id) {
      return fmt::format("run {} meets run {}: the socket belongs to another run", run_id,
                         identity_.run_id);
    }
    if (hello.layout_hash != identity_.layout_hash) {
      return fmt::format("memory layout {:x} meets layout {:x}: the loader holds another model",
                         hello.layout_hash, identity_.layout_hash);
    }
    return {};
  }

  bool send_to(const std::string& peer, const void* data, std::size_t size) {
    try {
      if (!socket_.send(zmq::buffer(peer), zmq::send_flags::sndmore | zmq::send_flags::dontwait)) {
        return false;
      }
      return socket_.send(zmq::buffer(data, size), zmq::send_flags::dontwait).has_value();
    } catch (const zmq::error_t& error) {
      if (error.num() == EHOSTUNREACH || error.num() == EAGAIN || error.num() == EINTR) {
        return false;
      }
      throw;
    }
  }

  std::string peer_;  // its routing id; empty: no Hello yet
  std::uint64_t greeted_ = 0;
};

class ClientChannel final : public CommonChannel {
 public:
  ClientChannel(const std::string& path, const Identity& identity)
      : CommonChannel(zmq::socket_type::dealer, path, identity),
        monitor_(context_, zmq::socket_type::pair) {
    socket_.set(zmq::sockopt::immediate, 1);
    socket_.set(zmq::sockopt::reconnect_ivl, 20);
    socket_.set(zmq::sockopt::reconnect_ivl_max, 500);
    const std::string monitor = fmt::format("inproc://monitor-{}", static_cast<const void*>(this));
    if (zmq_socket_monitor(socket_.handle(), monitor.c_str(),
                           ZMQ_EVENT_HANDSHAKE_SUCCEEDED | ZMQ_EVENT_DISCONNECTED) != 0) {
      fail("socket {} cannot be watched: {}", path, zmq_strerror(zmq_errno()));
    }
    monitor_.set(zmq::sockopt::linger, 0);
    monitor_.connect(monitor);
    try {
      socket_.connect(endpoint());
    } catch (const zmq::error_t& error) {
      fail("socket {} cannot be connected to: {} (a path has at most 107 bytes)", path,
           error.what());
    }
  }

  ~ClientChannel() override { zmq_socket_monitor(socket_.handle(), nullptr, 0); }

  bool send(messages::BodyUnion body, std::vector<std::byte>* sent) override {
    watch_connection();
    if (!connected_) {
      return false;
    }
    const auto packed = pack(std::move(body));
    if (!pass_on(packed, [this](const void* data, std::size_t size) {
          return socket_.send(zmq::buffer(data, size), zmq::send_flags::dontwait).has_value();
        })) {
      watch_connection();  // it may have ended this very moment
      return false;
    }
    count_sent(packed, sent);
    return true;
  }

  std::optional<Received> receive(Seconds timeout) override {
    zmq::pollitem_t items[2] = {{socket_.handle(), 0, ZMQ_POLLIN, 0},
                                {monitor_.handle(), 0, ZMQ_POLLIN, 0}};
    if (!wait_for(items, 2, timeout)) {
      return std::nullopt;
    }
    zmq::message_t frame;
    if (!socket_.recv(frame, zmq::recv_flags::dontwait)) {
      watch_connection();
      return std::nullopt;
    }
    if (lost()) {
      return std::nullopt;
    }
    Received message = verified(frame);
    if (received_ == 0 && message->body_type() == messages::Body::Stop) {
      const auto* reason = message->body_as_Stop()->reason();
      fail(Exit::foreign, "{}", reason != nullptr ? reason->str() : "refused without a reason");
    }
    if (stale(*message)) {
      return std::nullopt;
    }
    expect_next(*message);
    return message;
  }

  bool connected() const override { return connected_; }
  std::uint64_t connections() const override { return connections_; }

 private:
  // A monitor event is two frames; the first starts with the event's number. Stops at the end of a
  // connection: what was to be sent over it is not for the next one's peer.
  void watch_connection() {
    zmq::message_t event, address;
    bool ended = false;
    while (!ended && monitor_.recv(event, zmq::recv_flags::dontwait)) {
      std::uint16_t number = 0;
      std::memcpy(&number, event.data(), sizeof number);
      if (event.more()) {
        static_cast<void>(monitor_.recv(address, zmq::recv_flags::none));
      }
      connected_ = number == ZMQ_EVENT_HANDSHAKE_SUCCEEDED;
      connections_ += connected_ ? 1 : 0;
      ended = !connected_;
      sent_ = 0;  // a new connection counts anew on both sides
      received_ = 0;
    }
  }

  zmq::socket_t monitor_;
  bool connected_ = false;
  std::uint64_t connections_ = 0;
};

// A socket that a program connects, and what ZeroMQ says of its connections. In this order: the sockets end before their
// context.
struct WatchedDealer {
  WatchedDealer(const std::string& path, Bytes max_frame);
  ~WatchedDealer() { zmq_socket_monitor(socket.handle(), nullptr, 0); }
  WatchedDealer(const WatchedDealer&) = delete;
  WatchedDealer& operator=(const WatchedDealer&) = delete;

  zmq::context_t context{1};
  zmq::socket_t socket{context, zmq::socket_type::dealer};
  zmq::socket_t monitor{context, zmq::socket_type::pair};
};

WatchedDealer::WatchedDealer(const std::string& path, Bytes max_frame) {
  socket.set(zmq::sockopt::linger, 0);
  socket.set(zmq::sockopt::maxmsgsize, max_frame.n);
  socket.set(zmq::sockopt::sndhwm, kQueueLimit);
  socket.set(zmq::sockopt::rcvhwm, kQueueLimit);
  socket.set(zmq::sockopt::immediate, 1);
  socket.set(zmq::sockopt::reconnect_ivl, 20);
  socket.set(zmq::sockopt::reconnect_ivl_max, 500);
  constexpr const char* kEnds = "inproc://ends";  // of a context of its own
  if (zmq_socket_monitor(socket.handle(), kEnds, ZMQ_EVENT_DISCONNECTED) != 0) {
    fail("socket {} cannot be watched: {}", path, zmq_strerror(zmq_errno()));
  }
  monitor.set(zmq::sockopt::linger, 0);
  monitor.connect(kEnds);
  try {
    socket.connect("ipc://" + path);
  } catch (const zmq::error_t& error) {
    fail("socket {} cannot be connected to: {} (a path has at most 107 bytes)", path,
         error.what());
  }
}

class DealerFrames final : public FrameChannel {
 public:
  DealerFrames(std::string path, Bytes max_frame)
      : path_(std::move(path)),
        max_frame_(max_frame),
        dealer_(std::make_unique<WatchedDealer>(path_, max_frame_)) {}

  bool send(std::span<const std::string> frames) override {
    if (renewed()) {
      return false;
    }
    for (std::size_t i = 0; i < frames.size(); ++i) {
      const auto more = i + 1 < frames.size() ? zmq::send_flags::sndmore : zmq::send_flags::none;
      // The queue takes a message whole: only its first frame may be refused.
      const auto flags = i == 0 ? more | zmq::send_flags::dontwait : more;
      if (!dealer_->socket.send(zmq::buffer(frames[i]), flags)) {
        return false;
      }
    }
    return true;
  }

  std::vector<std::string> receive(Seconds timeout) override {
    std::vector<std::string> frames;
    zmq::pollitem_t items[2] = {{dealer_->socket.handle(), 0, ZMQ_POLLIN, 0},
                                {dealer_->monitor.handle(), 0, ZMQ_POLLIN, 0}};
    if (!wait_for(items, 2, timeout) || renewed()) {
      return frames;
    }
    zmq::message_t frame;
    do {
      if (!dealer_->socket.recv(frame, zmq::recv_flags::dontwait)) {
        break;
      }
      frames.push_back(frame.to_string());
    } while (frame.more());
    return frames;
  }

  std::uint64_t ended() const override { return ended_; }

 private:
  // ZeroMQ connects no socket again whose peer sent too large a frame: where a connection has ended, this makes another
  // socket.
  bool renewed() {
    zmq::message_t event;
    if (!dealer_->monitor.recv(event, zmq::recv_flags::dontwait)) {
      return false;
    }
    dealer_ = std::make_unique<WatchedDealer>(path_, max_frame_);
    ++ended_;
    return true;
  }

  std::string path_;
  Bytes max_frame_;
  std::unique_ptr<WatchedDealer> dealer_;
  std::uint64_t ended_ = 0;
};

}  // namespace

const messages::Message* message_in(std::span<const std::byte> bytes) {
  flatbuffers::Verifier verifier(reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size(),
                                 64, 10'000'000);
  if (!messages::VerifyMessageBuffer(verifier)) {
    return nullptr;
  }
  const messages::Message* message = messages::GetMessage(bytes.data());
  return message->body() == nullptr ? nullptr
                                    : message;  // a union's type may stand without its table
}

std::string build_id() { return POISE_BUILD; }

std::unique_ptr<Channel> serve(const std::string& path, const Identity& identity) {
  return std::make_unique<ServerChannel>(path, identity);
}

std::unique_ptr<Channel> connect(const std::string& path, const Identity& identity) {
  return std::make_unique<ClientChannel>(path, identity);
}

std::unique_ptr<FrameChannel> connect_frames(const std::string& path, Bytes max_frame) {
  return std::make_unique<DealerFrames>(path, max_frame);
}

}  // namespace poise
