#pragma once
// The messages' way between two processes: ZeroMQ ROUTER (the side that binds) to DEALER (the side
// that connects), over ipc://, and the only place that knows ZeroMQ. Nothing is queued for a peer
// that is not there; sizes and queues are bounded; a message is verified as a FlatBuffer, for its
// run id, epoch and gapless sequence number, before it is handed out. One thread uses a channel.
// The run directory's lock must be held before a server binds: ZeroMQ steals a live socket without
// a word.

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "common/messages_generated.h"
#include "common/units.h"

namespace poise {

inline constexpr std::uint32_t kProtocol = 1;
inline constexpr Bytes kMaxMessage =
    kMiB * 64;  // an iteration's tables for 10,000 sequences of 2,048 tokens are 20 MiB

// "poise 0.1.0 (release, …)": both ends of a channel must say the same.
std::string build_id();

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

// Whose messages are let through: those of this run, and not from before these epochs.
class Channel {
 public:
  virtual ~Channel() = default;
  // Packs, numbers and sends `body`; false where the peer is not there or its queue is full
  // (nothing is kept then). The bytes as sent go to `sent` if given: the order log wants them.
  virtual bool send(messages::BodyUnion body, std::vector<std::byte>* sent = nullptr) = 0;
  // The next message, waiting at most `timeout`; nothing when the time is over. A message that does
  // not verify fails.
  virtual std::optional<Received> receive(Seconds timeout) = 0;
  // True once a peer said Hello and it was accepted (server), or the connection stands (client).
  virtual bool connected() const = 0;
  // How many peers there were: Hellos accepted (server), connections (client). Where it has grown,
  // whoever is there knows nothing of what was said before.
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
// newer Hello replaces the older peer. A peer with another protocol, build, run or layout is
// answered with Stop and a sentence that names both sides: its own `receive` fails with it
// (Exit::foreign); this side goes on.
std::unique_ptr<Channel> serve(const std::string& path, const Identity& identity);
std::unique_ptr<Channel> connect(const std::string& path, const Identity& identity);

}  // namespace poise
