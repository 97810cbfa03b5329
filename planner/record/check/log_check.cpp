#include "planner/record/check/log_check.h"

#include <fmt/core.h>

#include <algorithm>

#include "common/channel.h"
#include "common/files/json_file.h"
#include "common/files/regular_file.h"
#include "common/formats/kv_format.h"
#include "common/model_shape.h"
#include "common/order_log.h"
#include "common/trouble.h"
#include "common/words.h"
#include "planner/record/check/log_check_batch.h"
#include "planner/record/check/log_check_weights.h"
#include "planner/record/log_extent.h"

namespace poise {
namespace {

constexpr std::int32_t kLargestLimit = 1 << 24;  // of a Configure

}  // namespace

void CheckedMemory::forget_device() {
  std::erase_if(blocks_, [](const auto& one) { return one.first.place != messages::Place::Host; });
}
void CheckedMemory::forget_host() {
  std::erase_if(blocks_, [](const auto& one) { return one.first.place == messages::Place::Host; });
}
const CheckedBlock* CheckedMemory::find(const CheckedBlockName& block) const {
  const auto found = blocks_.find(block);
  return found == blocks_.end() ? nullptr : &found->second;
}

std::string to_text(const CheckedBlockName& block) {
  return fmt::format("{} block {}{}", block.kind == messages::Kind::Kv ? "KV" : "ACT", block.number,
                     block.place == messages::Place::Host ? "" : " of the device");
}

std::uint64_t CheckedText::digest(std::uint64_t position) {
  while (digests_.size() <= position && digests_.size() < tokens_.size()) {
    const TokenId token = tokens_[digests_.size()];
    std::uint64_t digest = digests_.empty() ? 0xcbf29ce484222325ull : digests_.back();
    if (token < 0 || digest == 0) {
      digests_.push_back(0);
      continue;
    }
    digest = (digest ^ static_cast<std::uint64_t>(token)) * 0x9e3779b97f4a7c15ull;
    digest ^= digest >> 32;
    digests_.push_back(digest == 0 ? 1 : digest);
  }
  return position < digests_.size() ? digests_[position] : 0;
}

void CheckedText::resize(std::size_t size) {
  tokens_.resize(size, -1);
  digests_.resize(std::min(digests_.size(), size));
}

void CheckedText::set(std::size_t position, TokenId token) {
  if (position == tokens_.size()) {
    tokens_.push_back(token);
  }
  tokens_[position] = token;
  digests_.resize(std::min(digests_.size(), position));
}

LogCheck::LogCheck(std::int32_t layers, std::size_t pieces, std::int64_t window)
    : layers_(layers),
      window_(window),
      weights_(std::make_unique<CheckedWeights>(layers, pieces, report_)) {}

LogCheck::~LogCheck() = default;

void LogCheckReport::add_violation(const std::string& where, const std::string& what) {
  ++violations;
  if (first.size() < kViolationsTold) {
    first.push_back(fmt::format("{}: {}", where, what));
  }
}

void LogCheck::begin_in_the_middle() {
  late_ = true;
  weights_->trust_until_known();
}

void LogCheck::take(const messages::Message& message, LogKeeps keeps) {
  if (keeps == LogKeeps::full && keeps_ != LogKeeps::full) {
    weights_->trust_until_known();  // their orders were not in the log
  }
  keeps_ = keeps;
  const auto unpacked = [](const auto* table) {
    return std::unique_ptr<std::remove_pointer_t<decltype(table->UnPack())>>(table->UnPack());
  };
  if (const auto* grant = message.body_as_PoolGrant()) {
    grant_ = *unpacked(grant);
  } else if (const auto* configure = message.body_as_Configure()) {
    take(*unpacked(configure));
  } else if (const auto* ready = message.body_as_Ready()) {
    credits_ = ready->credits();
  } else if (const auto* iteration = message.body_as_Iteration()) {
    take(*unpacked(iteration), message.run_id() != nullptr ? message.run_id()->str() : "");
  } else if (const auto* order = message.body_as_LayerOrder()) {
    take(*unpacked(order));
  } else if (message.body_as_LayerDone() != nullptr) {
    if (undone_ == 0) {
      violation(fmt::format("iteration {}", message.body_as_LayerDone()->iteration()),
                "an order is reported done that was not sent");
    }
    undone_ -= undone_ > 0 ? 1 : 0;
  } else if (const auto* done = message.body_as_IterationDone()) {
    take(*unpacked(done));
  } else if (const auto* rejected = message.body_as_Rejected()) {
    violation(fmt::format("order {}", rejected->order()),
              fmt::format(
                  "the executor refused it: {}",
                  rejected->sentence() != nullptr ? shown(rejected->sentence()->str(), 1000) : ""));
  }
}

void LogCheck::take(const messages::ConfigureT& configure) {
  ++report_.starts;
  if (!configure_ || configure_->gpu_act_blocks != configure.gpu_act_blocks ||
      configure_->gpu_kv_blocks != configure.gpu_kv_blocks ||
      configure_->kv_format != configure.kv_format) {
    memory_.forget_device();
  }
  configure_ = configure;
  for (std::int32_t* limit :
       {&configure_->resident_layers, &configure_->max_rows, &configure_->max_mini_batch_rows,
        &configure_->max_sequences, &configure_->act_slots, &configure_->kv_slots,
        &configure_->max_context, &configure_->gpu_act_blocks, &configure_->gpu_kv_blocks}) {
    if (*limit < 0 || *limit > kLargestLimit) {
      violation(fmt::format("Configure {}", report_.starts),
                fmt::format("{} is no limit: an executor takes 0 to {}", *limit, kLargestLimit));
      *limit = std::clamp(*limit, 0, kLargestLimit);
    }
  }
  weights_->configure(configure_->resident_layers);
  order_.reset();
  undone_ = 0;
  for (const auto& [request, text] : texts_) {
    reopened_.insert(request);
  }
}

void LogCheck::take(const messages::IterationT& iteration, const std::string& run) {
  const std::string where = fmt::format("iteration {}", iteration.iteration);
  if (!configure_) {
    violation(where, "it comes before any Configure");
    configure_.emplace();
  }
  if (order_ && iteration.iteration <= order_->number) {
    violation(where, fmt::format("it follows iteration {}", order_->number));
  }
  if (order_ && !order_->thin && order_->next_stage < static_cast<std::uint32_t>(layers_) + 2) {
    violation(where, fmt::format("iteration {} was ordered up to stage {} only", order_->number,
                                 order_->next_stage));
  }
  const std::string pool = fmt::format("{} {}", run, iteration.pool_epoch);
  if (pool != pool_) {
    memory_.forget_host();
    pool_ = pool;
  }
  if (grant_ && grant_->kv_format != configure_->kv_format) {
    violation(where, fmt::format("the pool's KV blocks are {}, those of the buffers {}",
                                 name_of(static_cast<KvFormat>(grant_->kv_format)),
                                 name_of(static_cast<KvFormat>(configure_->kv_format))));
  }
  order_ = Order{.number = iteration.iteration,
                 .mini_batches = static_cast<std::uint32_t>(iteration.mini_batches.size()),
                 .thin = keeps_ == LogKeeps::tables};
  report_.thin_iterations += order_->thin ? 1 : 0;
  weights_->begin_iteration();
  ++report_.iterations;
  check_sharing(iteration);
  std::size_t rows = 0;
  for (std::size_t i = 0; i < iteration.mini_batches.size(); ++i) {
    const messages::MiniBatchT& batch = *iteration.mini_batches[i];
    if (batch.id != i) {
      violation(where, fmt::format("mini-batch {} stands at place {}", batch.id, i));
    }
    rows += batch.tokens.size();
    ++report_.mini_batches;
    MiniBatchCheck(*this, batch, static_cast<std::uint32_t>(i)).run();
  }
  report_.rows += rows;
  if (rows > static_cast<std::size_t>(configure_->max_rows)) {
    violation(where, fmt::format("{} rows, {} are configured", rows, configure_->max_rows));
  }
}

// A block to which a request's new rows go is of no other.
void LogCheck::check_sharing(const messages::IterationT& iteration) {
  struct Owner {
    std::uint32_t request;
    bool writes;
  };
  std::map<CheckedBlockName, Owner> owners;
  for (const auto& batch : iteration.mini_batches) {
    for (std::size_t i = 0; i < batch->sequences.size(); ++i) {
      const messages::Sequence& sequence = batch->sequences[i];
      std::uint64_t end = 0;  // of the block, in tokens
      for (const messages::AttentionEntry& entry : entries_of(*batch, sequence)) {
        end += kBlockTokens;
        const CheckedBlockName name = name_of(entry);
        if (!is_kept(entry) || takes_part(*batch, i, end / kBlockTokens - 1)) {
          continue;
        }
        const bool writes = end > sequence.context();
        const auto [owner, fresh] = owners.emplace(name, Owner{sequence.request(), writes});
        if (!fresh && owner->second.request != sequence.request() &&
            (writes || owner->second.writes)) {
          violation(fmt::format("iteration {}, mini-batch {}", iteration.iteration, batch->id),
                    fmt::format("{} is of request {} and of request {}", to_text(name),
                                owner->second.request, sequence.request()));
        }
        owner->second.writes = owner->second.writes || writes;
      }
    }
  }
}

void LogCheck::take(const messages::LayerOrderT& order) {
  const std::string where =
      fmt::format("iteration {}, order of stage {}", order.iteration, order.stage);
  if (!order_ || order.iteration != order_->number) {
    violation(where, "its iteration was not sent before it");
    return;
  }
  if (order.stage != order_->next_stage || order.stage > static_cast<std::uint32_t>(layers_) + 1) {
    violation(where,
              fmt::format("stage {} of 0 to {} comes next", order_->next_stage, layers_ + 1));
  }
  order_->next_stage = order.stage + 1;
  if (++undone_ > credits_) {
    violation(where,
              fmt::format("{} orders are under way, there are {} credits", undone_, credits_));
  }
  check_mini_batches(order, where);
  weights_->take(order, where);
}

void LogCheck::check_mini_batches(const messages::LayerOrderT& order, const std::string& where) {
  std::map<std::uint32_t, std::size_t> places;
  for (std::size_t i = 0; i < order.mini_batches.size(); ++i) {
    if (order.mini_batches[i] >= order_->mini_batches ||
        !places.emplace(order.mini_batches[i], i).second) {
      violation(where, fmt::format("mini-batch {} is none, or comes twice", order.mini_batches[i]));
    }
  }
  if (places.size() != order_->mini_batches) {
    violation(where, fmt::format("{} mini-batches of {}", places.size(), order_->mini_batches));
    return;
  }
  for (const std::uint32_t of_host : order_->on_host) {
    for (std::size_t i = places[of_host] + 1; i < order.mini_batches.size(); ++i) {
      if (!order_->on_host.contains(order.mini_batches[i])) {
        violation(where, fmt::format("mini-batch {} comes behind {}, which host cores attend",
                                     order.mini_batches[i], of_host));
      }
    }
  }
  for (const auto& [first, second] : order_->before) {
    if (places[first] > places[second]) {
      violation(where, fmt::format("mini-batch {} loads what mini-batch {} stores, and comes first",
                                   second, first));
    }
  }
}

bool LogCheck::Order::bars(std::uint32_t request, TokenId token) const {
  const auto mask = masks.find(request);
  if (mask == masks.end() || token < 0) {
    return false;
  }
  const auto at = static_cast<std::size_t>(token);
  return at / 32 >= mask->second.size() || (mask->second[at / 32] >> (at % 32) & 1) == 0;
}

void LogCheck::take(const messages::IterationDoneT& done) {
  const std::string where = fmt::format("iteration {}, results", done.iteration);
  if (!order_ || done.iteration != order_->number) {
    violation(where, "they are of no iteration under way");
    return;
  }
  for (const auto& result : done.results) {
    const auto sample = order_->samples.find(result->request);
    if (sample == order_->samples.end()) {
      violation(where, fmt::format("request {} has one that was not asked for", result->request));
      continue;
    }
    if (order_->bars(result->request, result->token)) {
      violation(where, fmt::format("request {} has token {}, which its mask bars", result->request,
                                   result->token));
    }
    if (sample->second && result->finite && result->token >= 0) {
      CheckedText& text = texts_[result->request];
      text.push(result->token);
      text.sampled = true;
    }
    order_->samples.erase(sample);
  }
  for (const auto& [request, generates] : order_->samples) {
    violation(where, fmt::format("request {} has none", request));
  }
  order_->samples.clear();
  order_->masks.clear();
}

LogCheckReport check_log(const std::filesystem::path& path) {
  OrderLogReader reader(path);
  const std::string what = fmt::format("the header of {}", path.string());
  const nlohmann::json json = parse_json(reader.header_json(), what);
  const JsonObject header(json, what);
  const auto layers = header.integer("layers", {.min = 1, .max = kMaxModelLayers});
  const auto pieces = header.integers("piece_bytes", {.min = 0, .max = INT64_MAX});
  if (!layers || !pieces) {
    header.refuse(layers ? "piece_bytes" : "layers", "is missing");
  }
  LogCheck check(static_cast<std::int32_t>(*layers), pieces->size(),
                 header.integer("window", {.min = 1, .max = INT32_MAX}).value_or(0));
  if (reader.extent().begins_late()) {
    check.begin_in_the_middle();
  }
  while (const auto record = reader.next()) {
    const messages::Message* message = message_in(record->bytes);
    if (message == nullptr) {
      fail("record {} of the order log is no message of this version of poise", record->number);
    }
    check.take(*message, record->keeps);
  }
  LogCheckReport report = check.report();
  report.torn = reader.torn_tail();
  report.extent = reader.extent();
  return report;
}

std::string to_text(const LogCheckReport& report) {
  std::string text;
  for (const std::string& line : report.first) {
    text += line + "\n";
  }
  const std::string totals =
      fmt::format("{}, {} in {}; {} loaded, {} of context read, {} stored, {} of weights fetched",
                  counted(report.iterations, "iteration"), counted(report.rows, "row"),
                  counted(report.mini_batches, "mini-batch"),
                  counted(report.blocks_loaded, "block"), counted(report.rows_read, "row"),
                  counted(report.rows_stored, "row"), counted(report.pieces_fetched, "piece"));
  if (report.violations == 0) {
    std::string unread =
        report.torn.n > 0 ? fmt::format("; {} torn off at the end", size_text(report.torn)) : "";
    if (const std::string missing = missing_text(report.extent); !missing.empty()) {
      unread += fmt::format(
          "; not checked: {} of context that were stored before, and the layers' "
          "orders of {}, since {}",
          counted(report.trusted_rows, "row"), counted(report.thin_iterations, "iteration"),
          missing);
    }
    return totals + ": every order holds" + unread + "\n";
  }
  return text +
         fmt::format("{}: {}{}\n", totals, counted(report.violations, "violation"),
                     report.violations > report.first.size() ? ", the first ones above" : "");
}

}  // namespace poise
