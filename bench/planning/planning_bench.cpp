// How long the planner takes for an iteration, beside its bounds: 1,024 requests of 2,048 tokens each are planned and
// packed into a message within 5 ms, 10,000 are planned within 50 ms.
//
//   poise-planning-bench [policy ...]
//
// The time is that of this thread on a core, the best of several iterations. The exit code is 1 where a bound is missed.

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

#include "common/liveness/thread_time.h"
#include "planner/policies/packing.h"
#include "planner/schedule/iteration.h"
#include "planner/schedule/schedule.h"

namespace poise {
namespace {

constexpr double kBoundMs = 5;
constexpr std::uint64_t kIterations = 12;

double now_ms() {
  return std::chrono::duration<double, std::milli>(thread_time()).count();
}

struct Took {
  double planning = 1e9, message = 1e9;  // ms
};

Took plan(std::string_view name, std::uint32_t count) {
  constexpr std::size_t kTokens = 2048;
  std::vector<Request> requests(count);
  for (std::uint32_t i = 0; i < count; ++i) {
    requests[i].id = {i + 1};
    // Lengths differ a little, so that mini-batches and ratios do too.
    requests[i].prompt = std::vector<TokenId>(kTokens - i % 64, 5);
    requests[i].sampling.max_tokens = 100;
  }
  const auto policy = make_policy(
      name, {.recompute_share = name == "token-recompute" ? std::optional(0.1) : std::nullopt});
  const std::uint32_t half = count * (kTokens / kBlockTokens + 7) / 2;
  const Allocation host{.act_blocks = half, .kv_blocks = half};
  const std::int32_t rows = static_cast<std::int32_t>(count * kTokens);
  Scheduler scheduler(*policy, host,
                      {.max_num_seqs = static_cast<std::int32_t>(count),
                       .prefill_rows = rows,
                       .sequence_rows = 2048 + 512});
  const PackLimits limits{
      .act_slots = 512, .kv_slots = 512, .tokens = 8192, .rows = 2048 + 512, .sequences = 1024};
  for (const Request& request : requests) {
    scheduler.add(request);
  }
  OrderTables order_tables(host);
  Took took;
  std::size_t batches_made = 0, bytes = 0;
  for (std::uint64_t iteration = 1; iteration <= kIterations; ++iteration) {
    const double begin = now_ms();
    const auto chunks = scheduler.next();
    const messages::IterationT tables =
        plan_iteration({.policy = *policy, .host = host, .limits = limits}, chunks, order_tables,
                       {.number = iteration});
    const double planned = now_ms() - begin;
    flatbuffers::FlatBufferBuilder builder;
    builder.Finish(messages::Iteration::Pack(builder, &tables));
    const double packed = now_ms() - begin - planned;
    std::vector<Outcome> outcomes;
    for (const ScheduledChunk& chunk : chunks) {
      outcomes.push_back({.request = chunk.request->request->id, .token = 3});
    }
    const double middle = now_ms();
    scheduler.complete(outcomes);
    if (iteration > 1) {  // the first is the prefill
      took.planning = std::min(took.planning, planned + now_ms() - middle);
      took.message = std::min(took.message, packed);
      batches_made = tables.mini_batches.size();
      bytes = builder.GetSize();
    }
  }
  fmt::print(
      "{:<16} {:>6} requests: planning {:6.2f} ms, message {:5.2f} ms, {} bytes, {} mini-batches\n",
      name, count, took.planning, took.message, bytes, batches_made);
  return took;
}

// Whether both bounds are kept.
bool bench(std::string_view name) {
  const Took many = plan(name, 1024);
  const Took ten_thousand = plan(name, 10'000);
  const bool kept =
      many.planning + many.message < kBoundMs && ten_thousand.planning < 10 * kBoundMs;
  if (!kept) {
    fmt::print("{}: beyond {} ms for 1,024 requests, or {} ms for 10,000\n", name, kBoundMs,
               10 * kBoundMs);
  }
  return kept;
}

}  // namespace
}  // namespace poise

int main(int argc, char** argv) {
  std::vector<std::string> names(argv + 1, argv + argc);
  if (names.empty()) {
    for (const poise::PolicyEntry& policy : poise::policies()) {
      names.emplace_back(policy.name);
    }
  }
  return std::ranges::count_if(names, [](const std::string& name) { return !poise::bench(name); }) >
                 0
             ? 1
             : 0;
}
