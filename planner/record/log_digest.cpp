#include "planner/record/log_digest.h"

#include <fmt/core.h>

#include <algorithm>
#include <memory>
#include <type_traits>

#include "common/channel.h"
#include "common/files/json_file.h"
#include "common/trouble.h"

namespace poise {
namespace {

LogFacts facts_of(const std::string& header, const std::filesystem::path& path) {
  const std::string what = fmt::format("the header of {}", path.string());
  const nlohmann::json json = parse_json(header, what);
  const JsonObject object(json, what);
  const auto count = [&](const char* name, std::int64_t most = 1 << 30) {
    const auto value = object.integer(name, {.min = 1, .max = most});
    if (!value) {
      object.refuse(name, "is missing");
    }
    return *value;
  };
  const std::string kept = object.string("kv_cache_dtype").value_or("auto");
  const auto kv_format = kv_format_from(kept);
  if (!kv_format) {
    object.refuse("kv_cache_dtype", fmt::format("is {}: there is no such type", shown(kept)));
  }
  LogFacts facts{.header = header,
                 .sizes = {.kv_row = {count("kv_row_bytes")}, .act_row = {count("act_row_bytes")}},
                 .kv_format = *kv_format,
                 .layers = static_cast<std::int32_t>(count("layers", kMaxModelLayers)),
                 .piece_bytes = {}};
  for (const std::int64_t bytes : object.integers("piece_bytes", {.min = 0, .max = INT64_MAX})
                                      .value_or(std::vector<std::int64_t>{})) {
    facts.piece_bytes.push_back(static_cast<std::uint64_t>(bytes));
  }
  return facts;
}

template <typename Table>
auto unpacked(const Table* table) {
  return std::unique_ptr<typename Table::NativeTableType>(table->UnPack());
}

template <typename... Arguments>
void call(const std::function<void(Arguments...)>& reader,
          const std::type_identity_t<Arguments>&... arguments) {
  if (reader) {
    reader(arguments...);
  }
}

std::uint64_t row_bytes(const BlockSizes& sizes, messages::Kind kind) {
  return static_cast<std::uint64_t>(
      sizes.row(kind == messages::Kind::Kv ? BlockKind::kv : BlockKind::act).n);
}

}  // namespace

LogDigest::LogDigest(const std::filesystem::path& path)
    : reader_(path), facts_(facts_of(reader_.header_json(), path)) {}

void LogDigest::read(const LogReaders& readers) {
  readers_ = readers;
  reader_.rewind();
  records_ = 0;
  over_ = false;
  run_id_.clear();
  while (const auto record = over_ ? std::nullopt : reader_.next()) {
    ++records_;
    take(*record);
  }
  give_iterations();  // what the log's end cut off
}

void LogDigest::give_iterations() {
  for (const auto& [number, iteration] : open_) {
    call(readers_.iteration, iteration);
  }
  open_.clear();
}

void LogDigest::take(const LoggedMessage& record) {
  const messages::Message* message = message_in(record.bytes);
  if (message == nullptr) {
    fail("record {} of the order log is no message of this version of poise", record.number);
  }
  const double time = static_cast<double>(record.time_ns) * 1e-9;
  notice_successors(*message, time);
  take(*message, record.keeps, time);
}

void LogDigest::notice_successors(const messages::Message& message, double time) {
  const std::string run_id = message.run_id() != nullptr ? message.run_id()->str() : "";
  if (run_id != run_id_) {
    if (!run_id_.empty()) {
      call(readers_.successor, Successor::attempt, time);
    }
    run_id_ = run_id;
    planner_epoch_ = executor_epoch_ = 0;
  }
  const auto notice = [&](std::uint32_t epoch, std::uint32_t& known, Successor successor) {
    if (epoch == 0 || epoch == known) {  // notes for the log's reader have no epochs
      return;
    }
    if (known != 0) {
      call(readers_.successor, successor, time);
    }
    known = epoch;
  };
  notice(message.planner_epoch(), planner_epoch_, Successor::planner);
  notice(message.executor_epoch(), executor_epoch_, Successor::gpu_executor);
}

void LogDigest::take(const messages::Message& message, LogKeeps keeps, double time) {
  if (const auto* configure = message.body_as_Configure()) {
    give_iterations();  // of an attempt that ended in between
    log_began_ns_ = configure->log_began_ns();
    call(readers_.configure, *unpacked(configure), time);
  } else if (const auto* ready = message.body_as_Ready()) {
    device_clock_ =
        static_cast<double>(static_cast<std::int64_t>(ready->device_began_ns() - log_began_ns_)) *
        1e-9;
    call(readers_.ready, *unpacked(ready), time);
  } else if (const auto* policy = message.body_as_PolicyInForce()) {
    call(readers_.policy, *unpacked(policy), time);
  } else if (const auto* pool = message.body_as_PoolGrant()) {
    call(readers_.pool, *unpacked(pool),
         message.run_id() != nullptr ? message.run_id()->str() : "");
  } else if (const auto* held = message.body_as_WeightsHeld()) {
    call(readers_.weights, *unpacked(held));
  } else if (const auto* tables = message.body_as_Iteration()) {
    if (readers_.until && tables->iteration() > *readers_.until) {
      over_ = true;
      return;
    }
    LoggedIteration& iteration = open_[tables->iteration()];
    iteration = {};
    tables->UnPackTo(&iteration.tables);
    iteration.sent = time;
    iteration.keeps = keeps;
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
    take_report(*done, time);
  } else if (const auto* answers = message.body_as_IterationDone()) {
    const auto found = open_.find(answers->iteration());
    if (found != open_.end()) {
      found->second.done = time;
      answers->UnPackTo(&found->second.answers);
      call(readers_.iteration, found->second);
      open_.erase(found);
    }
  }
}

void LogDigest::take_report(const messages::LayerDone& done, double time) {
  const auto found = open_.find(done.iteration());
  if (found == open_.end()) {
    return;
  }
  const auto layer = std::ranges::find_if(found->second.layers, [&](const LoggedLayer& one) {
    return one.order.stage == done.stage() && !one.done;
  });
  if (layer != found->second.layers.end()) {
    layer->done = time;
    layer->clock = device_clock_;
    done.UnPackTo(&layer->report);
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
