#include "planner/record/log_digest.h"

#include <fmt/core.h>

#include <algorithm>

#include "common/channel.h"
#include "common/files/json_file.h"
#include "common/trouble.h"

namespace poise {
namespace {

LogFacts facts_of(const std::string& header, const std::filesystem::path& path) {
  const std::string what = fmt::format("the header of {}", path.string());
  const nlohmann::json json = parse_json(header, what);
  const JsonObject object(json, what);
  const auto count = [&](const char* name) {
    const auto value = object.integer(name, {.min = 1, .max = 1 << 30});
    if (!value) {
      object.refuse(name, "is missing");
    }
    return *value;
  };
  LogFacts facts{.header = header,
                 .sizes = {.kv_row = {count("kv_row_bytes")}, .act_row = {count("act_row_bytes")}},
                 .layers = static_cast<std::int32_t>(count("layers")),
                 .piece_bytes = {}};
  for (const std::int64_t bytes : object.integers("piece_bytes", {.min = 0, .max = INT64_MAX})
                                      .value_or(std::vector<std::int64_t>{})) {
    facts.piece_bytes.push_back(static_cast<std::uint64_t>(bytes));
  }
  return facts;
}

std::uint64_t row_bytes(const BlockSizes& sizes, messages::Kind kind) {
  return static_cast<std::uint64_t>(
      sizes.row(kind == messages::Kind::Kv ? BlockKind::kv : BlockKind::act).n);
}

}  // namespace

LogDigest::LogDigest(const std::filesystem::path& path)
    : reader_(path), facts_(facts_of(reader_.header_json(), path)) {}

void LogDigest::read(
    const std::function<void(const LoggedIteration&)>& on_iteration,
    const std::function<void(const messages::ConfigureT&, double)>& on_configure,
    const std::function<void(const messages::ReadyT&, double)>& on_ready,
    const std::function<void(const messages::PolicyInForceT&, double)>& on_policy) {
  on_iteration_ = on_iteration;
  on_configure_ = on_configure;
  on_ready_ = on_ready;
  on_policy_ = on_policy;
  while (const auto record = reader_.next()) {
    ++records_;
    take(*record);
  }
  for (const auto& [number, iteration] : open_) {  // what the log's end cut off
    on_iteration_(iteration);
  }
  open_.clear();
}

void LogDigest::take(const LoggedMessage& record) {
  flatbuffers::Verifier verifier(reinterpret_cast<const std::uint8_t*>(record.bytes.data()),
                                 record.bytes.size(), 64, 10'000'000);
  if (!messages::VerifyMessageBuffer(verifier)) {
    fail("record {} of the order log is no message of this version of poise", record.number);
  }
  const messages::Message& message = *messages::GetMessage(record.bytes.data());
  const double time = static_cast<double>(record.time_ns) * 1e-9;
  if (const auto* configure = message.body_as_Configure()) {
    for (const auto& [number, iteration] : open_) {  // of an attempt that ended in between
      on_iteration_(iteration);
    }
    open_.clear();
    log_began_ns_ = configure->log_began_ns();
    on_configure_(messages::ConfigureT(*std::unique_ptr<messages::ConfigureT>(configure->UnPack())),
                  time);
  } else if (const auto* ready = message.body_as_Ready()) {
    device_clock_ = static_cast<double>(static_cast<std::int64_t>(ready->device_began_ns()) -
                                        static_cast<std::int64_t>(log_began_ns_)) *
                    1e-9;
    on_ready_(messages::ReadyT(*std::unique_ptr<messages::ReadyT>(ready->UnPack())), time);
  } else if (const auto* policy = message.body_as_PolicyInForce()) {
    on_policy_(
        messages::PolicyInForceT(*std::unique_ptr<messages::PolicyInForceT>(policy->UnPack())),
        time);
  } else if (const auto* tables = message.body_as_Iteration()) {
    LoggedIteration& iteration = open_[tables->iteration()];
    iteration = {};
    tables->UnPackTo(&iteration.tables);
    iteration.sent = time;
  } else if (const auto* order = message.body_as_LayerOrder()) {
    const auto found = open_.find(order->iteration());
    if (found != open_.end()) {
      LoggedLayer layer;
      order->UnPackTo(&layer.order);
      layer.sent = time;
      layer.ordered = ordered_bytes(layer.order, found->second.tables);
      found->second.layers.push_back(std::move(layer));
    }
  } else if (const auto* done = message.body_as_LayerDone()) {
    const auto found = open_.find(done->iteration());
    if (found != open_.end()) {
      const auto layer = std::ranges::find_if(found->second.layers, [&](const LoggedLayer& one) {
        return one.order.stage == done->stage() && !one.done;
      });
      if (layer != found->second.layers.end()) {
        layer->done = time;
        layer->clock = device_clock_;
        done->UnPackTo(&layer->report);
      }
    }
  } else if (const auto* results = message.body_as_IterationDone()) {
    const auto found = open_.find(results->iteration());
    if (found != open_.end()) {
      found->second.done = time;
      found->second.results = results->results() != nullptr ? results->results()->size() : 0;
      on_iteration_(found->second);
      open_.erase(found);
    }
  }
}

LinkSum LogDigest::ordered_bytes(const messages::LayerOrderT& order,
                                 const messages::IterationT& tables) const {
  LinkSum sum;
  for (const messages::WeightFetch& fetch : order.fetch) {
    sum.weights +=
        fetch.piece() < facts_.piece_bytes.size() ? facts_.piece_bytes[fetch.piece()] : 0;
  }
  const bool layer = order.stage > 0 && order.stage <= static_cast<std::uint32_t>(facts_.layers);
  if (!layer) {
    return sum;
  }
  for (const std::uint32_t id : order.mini_batches) {
    if (id >= tables.mini_batches.size()) {
      continue;
    }
    const messages::MiniBatchT& batch = *tables.mini_batches[id];
    for (const messages::BlockRun& run : batch.loads) {
      const std::uint64_t rows = std::uint64_t{run.count() - 1} * kBlockTokens + run.tail_tokens();
      (run.kind() == messages::Kind::Kv ? sum.kv : sum.act) +=
          rows * row_bytes(facts_.sizes, run.kind());
    }
    for (const messages::Store& store : batch.stores) {
      sum.stores += store.count() * row_bytes(facts_.sizes, store.kind());
    }
  }
  return sum;
}

std::string stage_name(std::uint32_t stage, std::int32_t layers) {
  if (stage == 0) {
    return "embedding";
  }
  return stage <= static_cast<std::uint32_t>(layers) ? fmt::format("layer {}", stage - 1) : "head";
}

}  // namespace poise
