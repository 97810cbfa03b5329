#pragma once
// An order log, grouped by iteration and layer for its readers: what was ordered (with the bytes that
// follow from it), when it was sent, and what the executor reported.
// Reads one log from beginning to end, one iteration in memory at a time.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "common/blocks.h"
#include "common/messages_generated.h"
#include "common/order_log.h"

namespace poise {

// What crosses the link.
struct LinkSum {
  std::uint64_t weights = 0, kv = 0, act = 0, stores = 0;
};

struct LoggedLayer {
  messages::LayerOrderT order;
  double sent = 0;  // seconds since the log began
  LinkSum ordered;
  std::optional<double> done;
  messages::LayerDoneT report;  // once done
  double clock = 0;             // seconds since the log began when the device's clock stood at 0
};

struct LoggedIteration {
  messages::IterationT tables;
  double sent = 0;
  std::vector<LoggedLayer> layers;  // by stage, as far as they were ordered
  std::optional<double> done;
  messages::IterationDoneT answers;  // once done
  LogKeeps keeps = LogKeeps::full;   // tables: neither orders of layers nor reports on them
};

// What of a log's header the digest needs.
struct LogFacts {
  std::string header;  // as it stands
  BlockSizes sizes{};
  KvFormat kv_format = KvFormat::plain;
  std::int32_t layers = 0;
  std::vector<std::uint64_t> piece_bytes;  // of a layer's weights
};

// Who goes on with a run: another attempt (all processes are new), or one new process of the same attempt.
enum class Successor : std::uint8_t { attempt, planner, gpu_executor };

// Called with what a log holds, in the log's order, with seconds since the log began. What is empty is
// not called.
struct LogReaders {
  std::optional<std::uint64_t> until{};  // reading ends where a later iteration begins
  std::function<void(const LoggedIteration&)> iteration;  // once all of it was read
  std::function<void(const messages::ConfigureT&, double)> configure;
  std::function<void(const messages::ReadyT&, double)> ready;
  std::function<void(const messages::PolicyInForceT&, double)> policy;
  std::function<void(const messages::PoolGrantT&, const std::string& run_id)> pool;
  std::function<void(const messages::WeightsHeldT&)> weights;
  std::function<void(Successor, double)> successor{};  // before the first message of or to it
};

class LogDigest {
 public:
  explicit LogDigest(const std::filesystem::path& path);

  const LogFacts& facts() const { return facts_; }
  // From the log's beginning, as far as it was written when this object was made.
  void read(const LogReaders& readers);
  std::uint64_t records() const { return records_; }
  double share_read() const { return reader_.share_read(); }
  Bytes torn_tail() const { return reader_.torn_tail(); }
  const LogExtent& extent() const { return reader_.extent(); }

 private:
  void take(const LoggedMessage& record);
  void take(const messages::Message& message, LogKeeps keeps, double time);
  void notice_successors(const messages::Message& message, double time);
  void take_report(const messages::LayerDone& done, double time);
  void give_iterations();
  LinkSum ordered_bytes(const messages::LayerOrderT& order,
                        const messages::IterationT& tables) const;

  OrderLogReader reader_;
  LogFacts facts_;
  std::map<std::uint64_t, LoggedIteration> open_;  // by number; one, as a rule
  std::uint64_t records_ = 0;
  bool over_ = false;  // a later iteration than wanted has begun
  LogReaders readers_;
  std::uint64_t log_began_ns_ = 0;  // CLOCK_MONOTONIC, as the last Configure said
  double device_clock_ = 0;         // LoggedLayer::clock of what follows
  std::string run_id_;              // of the messages so far, as the next two; empty and 0: none yet
  std::uint32_t planner_epoch_ = 0, executor_epoch_ = 0;
};

// "embedding", "layer 3", "head".
std::string stage_name(std::uint32_t stage, std::int32_t layers);

}  // namespace poise
