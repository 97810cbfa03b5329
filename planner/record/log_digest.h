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
  std::size_t results = 0;
};

// What of a log's header the digest needs.
struct LogFacts {
  std::string header;  // as it stands
  BlockSizes sizes{};
  std::int32_t layers = 0;
  std::vector<std::uint64_t> piece_bytes;  // of a layer's weights
};

class LogDigest {
 public:
  explicit LogDigest(const std::filesystem::path& path);

  const LogFacts& facts() const { return facts_; }
  // Calls `on_iteration` for each iteration, in the log's order, once all of it was read.
  void read(const std::function<void(const LoggedIteration&)>& on_iteration,
            const std::function<void(const messages::ConfigureT&, double)>& on_configure,
            const std::function<void(const messages::ReadyT&, double)>& on_ready,
            const std::function<void(const messages::PolicyInForceT&, double)>& on_policy);
  std::uint64_t records() const { return records_; }
  Bytes torn_tail() const { return reader_.torn_tail(); }

 private:
  void take(const LoggedMessage& record);
  LinkSum ordered_bytes(const messages::LayerOrderT& order,
                        const messages::IterationT& tables) const;

  OrderLogReader reader_;
  LogFacts facts_;
  std::map<std::uint64_t, LoggedIteration> open_;  // by number; one, as a rule
  std::uint64_t records_ = 0;
  std::function<void(const LoggedIteration&)> on_iteration_;
  std::function<void(const messages::ConfigureT&, double)> on_configure_;
  std::function<void(const messages::ReadyT&, double)> on_ready_;
  std::function<void(const messages::PolicyInForceT&, double)> on_policy_;
  std::uint64_t log_began_ns_ = 0;  // CLOCK_MONOTONIC, as the last Configure said
  double device_clock_ = 0;         // LoggedLayer::clock of what follows
};

// "embedding", "layer 3", "head".
std::string stage_name(std::uint32_t stage, std::int32_t layers);

}  // namespace poise
