#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <utility>

#include "common/files/json.h"
#include "common/files/regular_file.h"
#include "planner/record/inspect.h"

namespace poise {
namespace {

using Json = nlohmann::ordered_json;

Json of(const LinkSum& sum) {
  return {{"weights", sum.weights}, {"kv", sum.kv}, {"act", sum.act}, {"stores", sum.stores}};
}

Json of(const std::unique_ptr<messages::StreamReport>& stream) {
  return stream ? Json{{"bytes", stream->bytes()},
                       {"busy_ms", static_cast<double>(stream->busy_ns()) * 1e-6},
                       {"wait_ms", static_cast<double>(stream->wait_ns()) * 1e-6}}
                : Json();
}

Json of(const messages::MiniBatchT& batch) {
  Json sequences = Json::array(), loads = Json::array(), regenerate = Json::array();
  for (const messages::Sequence& sequence : batch.sequences) {
    Json blocks = Json::array();  // "A12" is ACT block 12
    const auto count = static_cast<std::uint32_t>(
        ceil_div(std::int64_t{sequence.context()} + sequence.new_tokens(), kBlockTokens));
    for (std::uint32_t i = 0; i < count && sequence.first_entry() + i < batch.entries.size(); ++i) {
      const messages::AttentionEntry& entry = batch.entries[sequence.first_entry() + i];
      const char kind = entry.kind() == messages::Kind::Act ? 'A' : 'K';
      blocks.push_back(fmt::format("{}{}", kind, entry.block()));
    }
    sequences.push_back({{"request", sequence.request()},
                         {"context", sequence.context()},
                         {"new_tokens", sequence.new_tokens()},
                         {"blocks", std::move(blocks)}});
  }
  for (const messages::BlockRun& run : batch.loads) {
    loads.push_back({{"kind", messages::EnumNameKind(run.kind())},
                     {"first_block", run.first_block()},
                     {"first_slot", run.first_slot()},
                     {"count", run.count()},
                     {"tail_tokens", run.tail_tokens()}});
  }
  for (const messages::SlotRange& range : batch.regenerate) {
    regenerate.push_back({{"first_slot", range.first_slot()}, {"count", range.count()}});
  }
  return {{"id", batch.id},
          {"rows", batch.tokens.size()},
          {"sequences", std::move(sequences)},
          {"loads", std::move(loads)},
          {"regenerate", std::move(regenerate)},
          {"on_host",
           !batch.entries.empty() && batch.entries[0].where() == messages::Where::HostInPlace},
          {"absorbed", std::ranges::count(batch.entries, messages::Where::Activation,
                                          &messages::AttentionEntry::where)},
          {"stores", batch.stores.size()},
          {"samples", batch.samples.size()},
          {"masked", std::ranges::count_if(batch.samples,
                                           [](const auto& one) { return !one->mask.empty(); })}};
}

// Times as those of the log.
Json of(const messages::Span& span, double clock) {
  static constexpr std::array<const char*, 4> kStreams{"copy_in", "compute", "copy_out", "host"};
  Json json{{"kind", messages::EnumNameSpanKind(span.kind())},
            {"stream", span.stream() < kStreams.size() ? kStreams[span.stream()] : "?"},
            {"mini_batch", span.mini_batch()},
            {"begin_s", clock + static_cast<double>(span.begin_ns()) * 1e-9},
            {"end_s", clock + static_cast<double>(span.end_ns()) * 1e-9}};
  if (span.kind() == messages::SpanKind::Weights) {
    json["layer"] = span.layer();
    json["piece"] = span.piece();
  }
  if (span.bytes() > 0) {
    json["bytes"] = span.bytes();
  }
  return json;
}

Json of(const LoggedLayer& layer, const LogFacts& facts) {
  Json fetch = Json::array();
  for (const messages::WeightFetch& one : layer.order.fetch) {
    fetch.push_back({{"layer", one.layer()},
                     {"piece", one.piece()},
                     {"after_mini_batch", one.after_mini_batch()}});
  }
  Json json{{"type", "layer"},
            {"iteration", layer.order.iteration},
            {"stage", layer.order.stage},
            {"name", stage_name(layer.order.stage, facts.layers)},
            {"sent_s", layer.sent},
            {"mini_batches", layer.order.mini_batches},
            {"fetch", std::move(fetch)},
            {"ordered_bytes", of(layer.ordered)}};
  if (!layer.done) {
    return json;
  }
  const messages::LayerDoneT& report = layer.report;
  json["done_s"] = *layer.done;
  json["copy_in"] = of(report.copy_in);
  json["compute"] = of(report.compute);
  json["copy_out"] = of(report.copy_out);
  if (report.host) {
    json["host"] = of(report.host);
  }
  if (report.stage == 0) {
    json["rested_ms"] = static_cast<double>(report.rested_ns) * 1e-6;
  }
  if (report.link) {
    json["link_bytes"] = of(LinkSum{.weights = report.link->weights(),
                                    .kv = report.link->kv(),
                                    .act = report.link->act(),
                                    .stores = report.link->stores()});
  }
  json["balance"] = json_of(balance_of(report, facts.sizes));
  json["reported_mini_batches"] = Json::array();
  for (const messages::MiniBatchReport& batch : report.mini_batches) {
    json["reported_mini_batches"].push_back(
        {{"id", batch.id()},
         {"kv_blocks", batch.kv_blocks()},
         {"act_blocks", batch.act_blocks()},
         {"rows", batch.rows()},
         {"compute_ms", static_cast<double>(batch.compute_ns()) * 1e-6}});
  }
  if (!report.spans.empty()) {
    json["spans"] = Json::array();
    for (const messages::Span& span : report.spans) {
      json["spans"].push_back(of(span, layer.clock));
    }
  }
  return json;
}

}  // namespace

std::string iteration_json(const LoggedIteration& iteration, const LogFacts& facts,
                           std::optional<std::uint32_t> layer) {
  Json json{{"type", "iteration"},
            {"iteration", iteration.tables.iteration},
            {"pool_epoch", iteration.tables.pool_epoch},
            {"generates_only", kind_of(iteration.tables).decodes},
            {"sent_s", iteration.sent}};
  if (iteration.done) {
    json["done_s"] = *iteration.done;
    json["results"] = iteration.answers.results.size();
    if (has_reports(iteration)) {
      json["balance"] = json_of(sums_of(iteration, facts));
    }
  }
  json["mini_batches"] = Json::array();
  for (const auto& batch : iteration.tables.mini_batches) {
    json["mini_batches"].push_back(of(*batch));
  }
  std::string lines = json.dump() + "\n";
  for (const LoggedLayer& one : iteration.layers) {
    if (!layer || one.order.stage == *layer + 1) {
      lines += of(one, facts).dump() + "\n";
    }
  }
  return lines;
}

std::string balance_json(const Balance& balance, const BalanceFacts& facts) {
  Json json{{"type", "balance"}};
  json.update(json_of(balance, facts));
  return json.dump() + "\n";
}

std::string configure_json(const messages::ConfigureT& configure, double time) {
  const Json json{{"type", "configure"},
                  {"sent_s", time},
                  {"gpu_memory", configure.gpu_memory},
                  {"resident_layers", configure.resident_layers},
                  {"gpu_act_blocks", configure.gpu_act_blocks},
                  {"gpu_kv_blocks", configure.gpu_kv_blocks},
                  {"max_rows", configure.max_rows},
                  {"max_mini_batch_rows", configure.max_mini_batch_rows},
                  {"max_sequences", configure.max_sequences},
                  {"act_slots", configure.act_slots},
                  {"kv_slots", configure.kv_slots},
                  {"logits_rows", configure.logits_rows},
                  {"logit_edits", configure.logit_edits},
                  {"sides", configure.sides},
                  {"max_context", configure.max_context},
                  {"kv_cache_dtype", name_of(static_cast<KvFormat>(configure.kv_format))},
                  {"host_attention", configure.host_attention},
                  {"absorption", configure.absorption},
                  {"trace", configure.trace}};
  return json.dump() + "\n";
}

std::string policy_json(const messages::PolicyInForceT& policy, double time) {
  const Json json{{"type", "policy"},
                  {"sent_s", time},
                  {"policy", shown(policy.policy)},
                  {"from_iteration", policy.iteration},
                  {"act_blocks", policy.act_blocks},
                  {"kv_blocks", policy.kv_blocks}};
  return json.dump() + "\n";
}

std::string ready_json(const messages::ReadyT& ready, double time) {
  const Json json{{"type", "ready"},
                  {"done_s", time},
                  {"device_bytes", ready.device_bytes},
                  {"host_bytes", ready.host_bytes},
                  {"credits", ready.credits},
                  {"link_bytes_per_s", ready.link_bytes_per_s}};
  return json.dump() + "\n";
}

}  // namespace poise
