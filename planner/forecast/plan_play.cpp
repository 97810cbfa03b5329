#include "planner/forecast/plan_play.h"

#include <algorithm>
#include <cmath>

#include "planner/schedule/iteration.h"

namespace poise {
namespace {

constexpr double kAlike = 0.04;  // relative difference up to which two iterations count as alike
constexpr std::int64_t kSteps = 1'000'000;  // rows of requests that are scheduled at most
constexpr std::int32_t kRefills = 4;        // how many times the machine is filled, at most

}  // namespace

Player::Player(const SetUp& made, const BatchOptions& batch)
    : made_(made),
      limits_(pack_limits(batch, made.placement.device)),
      layout_(weight_layout(made.shape, made.dtype)),
      tables_(made.placement.host, windows_of(made.shape), made.placement.device.absorption),
      executor_(made.profile, layout_, made.placement.device, windows_of(made.shape)) {
  const std::int32_t streamed =
      made.shape.num_hidden_layers - made.placement.device.resident_layers;
  weights_ = streamed <= 2 ? 0 : static_cast<double>(layout_.layer.bytes.n) * streamed;
}

const Cost& Player::cost_of(std::span<const ScheduledChunk> chunks) {
  double decoding = 0, prompts = 0, context = 0;
  for (const ScheduledChunk& chunk : chunks) {
    (chunk.new_tokens == 1 ? decoding : prompts) += chunk.new_tokens;
    context += chunk.context;
  }
  const auto bucket = [](double n) { return std::lround(std::log1p(n) / kAlike); };
  const auto [at, fresh] = known_.try_emplace({bucket(decoding), bucket(prompts), bucket(context)});
  if (fresh) {
    at->second = play(chunks);
  }
  return at->second;
}

Cost Player::play(std::span<const ScheduledChunk> chunks) {
  const auto tables =
      plan_iteration({.policy = *made_.policy, .host = made_.placement.host, .limits = limits_},
                     chunks, tables_, {.number = ++number_});
  if (number_ == 1) {  // the weights of the first two layers, which others find fetched
    executor_.run(tables, false);
  }
  const Seconds before = executor_.now();
  const LinkVolume crossed = executor_.volume();
  executor_.run(tables, false);
  Cost cost{.seconds = (executor_.now() - before).n, .weights = weights_};
  const BlockSizes sizes = block_sizes(made_.shape, made_.dtype, made_.batch.kv_format);
  const double layers = made_.shape.num_hidden_layers;
  const auto bytes = [&](BlockKind kind, double blocks) {
    return blocks * static_cast<double>(sizes.block(kind).n);
  };
  cost.kv = bytes(BlockKind::kv, executor_.volume().kv - crossed.kv);
  cost.act = bytes(BlockKind::act, executor_.volume().act - crossed.act);
  for (const auto& batch : tables.mini_batches) {
    for (const messages::Store& store : batch->stores) {
      if (store.place() == messages::Place::Host) {
        const bool kv = store.kind() == messages::Kind::Kv;
        cost.stores += store.count() * layers *
                       static_cast<double>(sizes.row(kv ? BlockKind::kv : BlockKind::act).n);
      }
    }
  }
  return cost;
}

std::vector<Request> some_of(std::span<const RequestSize> all, std::int32_t sequences) {
  double answers = 0;
  for (const RequestSize& one : all) {
    answers += one.answer;
  }
  const double each = std::max(1.0, answers / static_cast<double>(all.size()));
  const auto count = static_cast<std::size_t>(
      std::clamp<double>(std::min(static_cast<double>(kSteps) / each, double{kRefills} * sequences),
                         std::min<double>(3.0 * sequences, static_cast<double>(all.size())),
                         static_cast<double>(all.size())));
  std::vector<Request> some(count);
  for (std::size_t i = 0; i < count; ++i) {
    const RequestSize& one = all[i * all.size() / count];
    some[i].id = one.id;
    some[i].prompt = std::vector<TokenId>(static_cast<std::size_t>(one.prompt), TokenId{0});
    some[i].sampling.max_tokens = one.answer;
  }
  return some;
}

Played play(const SetUp& made, Player& player, std::span<const Request> requests) {
  Scheduler scheduler(*made.policy, made.placement.host,
                      schedule_limits(made.batch, made.demand, made.placement.host,
                                      made.placement.device));
  for (const Request& request : requests) {
    scheduler.add(request);
  }
  Played played;
  while (!scheduler.idle()) {
    const auto chunks = scheduler.next();
    const Cost& cost = player.cost_of(chunks);
    played.total.add(cost);
    ++played.iterations;
    double prompts = 0;
    std::int64_t generating = 0;
    for (const ScheduledChunk& chunk : chunks) {
      prompts += chunk.new_tokens > 1 ? chunk.new_tokens : 0;
      generating += chunk.new_tokens == 1 ? 1 : 0;
    }
    played.at_a_time = std::max(played.at_a_time, generating);
    const std::vector<Outcome> outcomes = any_outcomes(chunks);
    for (const Outcome& outcome : outcomes) {
      if (!outcome.token) {
        played.ends.push_back(played.total.seconds);
      }
    }
    const std::int64_t rows = std::ssize(chunks);
    if (prompts > 0) {
      played.prefill_seconds += cost.seconds;
      played.prompt_rows += prompts;
    } else if (rows >= played.most_rows) {
      if (rows > played.most_rows) {
        played.decode = {};
        played.decoding = 0;
        played.most_rows = rows;
      }
      played.decode.add(cost);
      ++played.decoding;
    }
    scheduler.complete(outcomes);
  }
  played.preemptions = scheduler.preemptions();
  return played;
}

// Requests that are alike end in bursts, each of as many as run at a time, so the rate
// is counted over whole refills, without the last one, which no request follows.
double stretch(const Played& played, std::size_t all, std::int64_t at_a_time) {
  const std::size_t some = played.ends.size();
  if (some >= all) {
    return 1;
  }
  const auto refill = static_cast<std::size_t>(at_a_time);
  const std::size_t refills = some / refill;
  double each = played.total.seconds / static_cast<double>(some);
  if (refills >= 3) {
    const std::size_t counted = (refills - 2) * refill;
    const std::size_t last = some - refill - 1;
    each = (played.ends[last] - played.ends[last - counted]) / static_cast<double>(counted);
  }
  return 1 + each * static_cast<double>(all - some) / played.total.seconds;
}

}  // namespace poise
