#pragma once
// How messages pass between two processes: ZeroMQ ROUTER (the side that binds) to DEALER (the side
// that connects), over ipc://. Only this file knows ZeroMQ. Nothing is queued for an absent peer;
// sizes and queues are bounded. Before a channel hands out a message it verifies the FlatBuffer, the
// run id, the epoch and that no sequence number is missing. One thread uses a channel. A server must
// hold the run directory's lock before it binds: ZeroMQ takes a live socket over without an
// error.

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/messages_generated.h"
#include "common/units.h"

namespace poise {

inline constexpr std::uint32_t kProtocol = 1;
inline constexpr Bytes kMaxMessage =
    kMiB * 64;  // an iteration's tables for 10,000 sequences of 2,048 tokens are 20 MiB
inline constexpr Bytes kMaxFrame =
    kMiB * 128;  // a chat's rendered prompt of 16 MiB, each byte of it escaped, is 96 MiB

// "poise 0.1.0 (release, …)": both ends of a channel must say the same.
std::string build_id();

// The message that the bytes hold; nullptr if they do not verify, or if it has no body. A receiver may
// rely on `body_as_…` where the body's type says so.
const messages::Message* message_in(std::span<const std::byte> bytes);

// A message that was received and verified; owns its bytes.
class Received {
 public:
  explicit Received(std::vector<std::byte> bytes) : bytes_(std::move(bytes)) {}
  const messages::Message& operator*() const { return *messages::GetMessage(bytes_.data()); }
  const messages::Message* operator->() const { return &**this; }
  std::span<const std::byte> bytes() const { return bytes_; }

 private:
  std::vector<std::byte> bytes_;
};

struct Epochs {
  std::uint32_t planner = 0;
  std::uint32_t executor = 0;
};

// Lets through messages of this run, but none from before these epochs.
class Channel {
 public:
  virtual ~Channel() = default;
  // Packs, numbers and sends `body`; false if the peer is absent or its queue is full (the message
  // is then dropped). The bytes as sent go to `sent` if given: the order log stores them. Fails if the
  // message is larger than kMaxMessage.
  virtual bool send(messages::BodyUnion body, std::vector<std::byte>* sent = nullptr) = 0;
  // The next message; nothing if none arrives within `timeout`. Fails if a message does not
  // verify.
  virtual std::optional<Received> receive(Seconds timeout) = 0;
  // True once a peer's Hello was accepted (server), or the connection is established (client).
  virtual bool connected() const = 0;
  // How many peers there were: Hellos accepted (server), connections (client). If the number has
  // grown, the present peer is a new one and has seen no earlier message.
  virtual std::uint64_t connections() const = 0;
  virtual void set_epochs(Epochs epochs) = 0;
  virtual Epochs epochs() const = 0;
};

// Sends one table: `send(channel, messages::AckT{.seq = 7})`.
template <typename Table>
bool send(Channel& channel, Table&& table, std::vector<std::byte>* sent = nullptr) {
  messages::BodyUnion body;
  body.Set(std::forward<Table>(table));
  return channel.send(std::move(body), sent);
}

// What a Hello must agree with.
struct Identity {
  std::string run_id;
  std::uint64_t layout_hash = 0;
};

// Binds `path` (a socket in a directory only this user may enter) and serves one peer at a time: a
// newer Hello replaces the older peer. The server answers a peer of another protocol, build, run or
// layout with Stop and a sentence that names both sides. The peer's `receive` then fails with that
// sentence (Exit::foreign); the server continues.
std::unique_ptr<Channel> serve(const std::string& path, const Identity& identity);
std::unique_ptr<Channel> connect(const std::string& path, const Identity& identity);

// Messages to and from a program that is none of poise's three, such as the front of `poise serve`: each
// is one or more frames of bytes, and what they mean is the two ends' own affair. ZeroMQ DEALER to a
// socket that the other program binds. Nothing is queued while it is absent. A connection that ends, also over a frame
// beyond kMaxFrame, is made again; what was under way on it is lost. One thread.
class FrameChannel {
 public:
  virtual ~FrameChannel() = default;
  // False if the peer is absent or its queue is full: nothing was sent then. REQUIRES: there is a frame.
  virtual bool send(std::span<const std::string> frames) = 0;
  // The next message; empty if none arrives within `timeout`.
  virtual std::vector<std::string> receive(Seconds timeout) = 0;
  // How many connections have ended. If the number has grown, messages may be lost in both directions.
  virtual std::uint64_t ended() const = 0;
};
std::unique_ptr<FrameChannel> connect_frames(const std::string& path, Bytes max_frame = kMaxFrame);

}  // namespace poise
