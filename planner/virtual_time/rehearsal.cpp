#include "planner/virtual_time/rehearsal.h"

#include <algorithm>
#include <cmath>

#include "planner/schedule/iteration.h"
#include "planner/schedule/schedule.h"
#include "planner/virtual_time/virtual_executor.h"

namespace poise {
namespace {

constexpr TokenId kRehearsedToken = 0;

// Answers grow meanwhile, and with them what the link and computation have to do, each in its own way: where
// one limits early answers and the other late ones, no single moment stands for all.
constexpr double kEarly = 0.25, kLate = 0.75;
// Of iterations that are alike one is played: of this many, and of more while contexts are long beside what they grow by.
constexpr std::int64_t kStride = 4;
constexpr std::int64_t kAlike = 25;  // a part of the requests; as many more or fewer generate
constexpr std::int64_t kGrown = 64;  // a part of all contexts

// What the time of an iteration depends on most.
struct Likeness {
  std::int64_t prompt_rows = 0, generating = 0, context = 0;

  bool like(const Likeness& other) const {
    return prompt_rows == other.prompt_rows && generating > 0 &&
           kAlike * std::abs(generating - other.generating) <= generating;
  }
  bool has_as_much_context(const Likeness& other) const {
    return kGrown * std::abs(context - other.context) <= context;
  }
};

Likeness likeness_of(std::span<const ScheduledChunk> chunks) {
  Likeness all;
  for (const ScheduledChunk& chunk : chunks) {
    (chunk.new_tokens > 1 ? all.prompt_rows : all.generating) += chunk.new_tokens;
    all.context += chunk.context;
  }
  return all;
}

// Requests that differ in their numbers alone, and stand for `represented` times as many.
struct Stand {
  std::vector<Request> requests;
  double represented = 1;
};

// With this share of their answers behind them.
Stand stand_for(const Rehearsal& rehearsal, double answered) {
  const double sequences = std::max(rehearsal.sequences, 1);
  const double most = std::max(static_cast<double>(rehearsal.most_blocks) / sequences, 1.0);
  const double blocks =
      static_cast<double>(rehearsal.host.all_act_blocks() + rehearsal.host.all_kv_blocks());
  const double running = std::max(1.0, std::floor(std::min(sequences, blocks / most + 1e-9)));
  const double played =
      std::clamp(std::floor(static_cast<double>(kRehearsedBlocks) / most), 1.0, running);
  const auto tokens = static_cast<std::int32_t>(most * kBlockTokens);
  const auto prompt =
      static_cast<std::int32_t>(static_cast<double>(rehearsal.prompt_rows) / sequences);
  const std::int32_t context = std::clamp(
      static_cast<std::int32_t>(prompt + answered * (tokens - prompt)), 1, std::max(tokens - 2, 1));
  Stand stand{.requests = std::vector<Request>(static_cast<std::size_t>(played)),
              .represented = running / played};
  for (std::size_t i = 0; i < stand.requests.size(); ++i) {
    stand.requests[i].id = {static_cast<std::uint32_t>(i + 1)};
    stand.requests[i].prompt =
        std::vector<TokenId>(static_cast<std::size_t>(context), kRehearsedToken);
    stand.requests[i].sampling.max_tokens = std::max(tokens - context, 2);
  }
  return stand;
}

Allocation part_of(const Allocation& blocks, double represented) {
  Allocation chunk = blocks;
  for (std::uint32_t* n : {&chunk.act_blocks, &chunk.kv_blocks, &chunk.gpu_act_blocks,
                           &chunk.gpu_kv_blocks, &chunk.host_blocks}) {
    *n = static_cast<std::uint32_t>(std::ceil(*n / represented));
  }
  return chunk;
}

// Of an iteration among others like it.
Seconds time_of(const Profile& profile, const WeightLayout& layout, const Rehearsal& rehearsal,
                const messages::IterationT& iteration) {
  VirtualExecutor executor(profile, layout, rehearsal.device, rehearsal.windows);
  executor.run(iteration, false);
  const Seconds before =
      executor.now();  // the second finds weights fetched ahead, as all later ones
  executor.run(iteration, false);
  return executor.now() - before;
}

// Requests with this share of their answers behind them. Without `prefill` prompts take no time.
Rehearsed rehearse_at(double answered, bool prefill, const Profile& profile, const Policy& policy,
                      const WeightLayout& layout, const Rehearsal& rehearsal) {
  const Stand stand = stand_for(rehearsal, answered);
  const auto count = static_cast<std::int32_t>(stand.requests.size());
  const std::int32_t longest = stand.requests.front().most_context();
  Allocation host = part_of(rehearsal.host, stand.represented);
  // Rounded lengths may ask for a block more than there are.
  std::uint32_t& spare = host.kv_blocks > 0 ? host.kv_blocks : host.act_blocks;
  const std::int64_t wanted = std::int64_t{count} * blocks_for(longest);
  spare += static_cast<std::uint32_t>(
      std::max<std::int64_t>(wanted - host.all_act_blocks() - host.all_kv_blocks(), 0));
  OrderTables tables(host, rehearsal.windows, rehearsal.device.absorption);
  const PackingRule packing{.policy = policy, .host = host, .limits = rehearsal.pack};
  const auto tables_of = [&](std::span<const ScheduledChunk> chunks) {
    return plan_iteration(packing, chunks, tables, {});
  };

  Scheduler answers(
      policy, host,
      {.max_num_seqs = count, .prefill_rows = count * longest, .sequence_rows = longest + 1});
  std::vector<Outcome> outcomes;
  for (const Request& request : stand.requests) {
    answers.add(request);
    outcomes.push_back({.request = request.id, .token = kRehearsedToken});
  }
  Rehearsed times{};
  if (prefill) {
    Scheduler prompts(policy, host,
                      {.max_num_seqs = count,
                       .prefill_rows = std::max(rehearsal.prefill_rows, 1),
                       .sequence_rows = rehearsal.device.max_mini_batch_rows});
    for (const Request& request : stand.requests) {
      prompts.add(request);
    }
    times.prefill = time_of(profile, layout, rehearsal, tables_of(prompts.next()));
  }
  answers.next();  // all prompts at once
  answers.complete(outcomes);
  Profile chunk = profile;
  chunk.load_w = chunk.load_w * (1 / stand.represented);
  times.decoding = time_of(chunk, layout, rehearsal, tables_of(answers.next())) * stand.represented;
  return times;
}

Request request_of(std::int64_t number, std::int64_t prompt, std::int64_t answer) {
  Request request;
  request.id = {static_cast<std::uint32_t>(number)};
  request.prompt = std::vector<TokenId>(static_cast<std::size_t>(prompt), kRehearsedToken);
  request.sampling.max_tokens = static_cast<std::int32_t>(answer);
  return request;
}

// All requests; none if they are too many to rehearse.
std::vector<Request> job_of(const Rehearsal& rehearsal) {
  const std::int64_t sequences = std::max(rehearsal.sequences, 1);
  const std::int64_t all = std::max<std::int64_t>(rehearsal.requests, sequences);
  const std::int64_t most = std::max<std::int64_t>(rehearsal.most_blocks / sequences, 1);
  const std::int64_t blocks = rehearsal.host.all_act_blocks() + rehearsal.host.all_kv_blocks();
  if (blocks < most || sequences > kRehearsedRequests) {
    return {};
  }
  const std::int64_t together = std::clamp<std::int64_t>(blocks / most, 1, sequences);
  std::vector<Request> requests;
  std::int64_t answers = 0;
  if (rehearsal.each) {
    for (const RequestSize& one : *rehearsal.each) {
      requests.push_back(
          request_of(std::ssize(requests) + 1, std::max(one.prompt, 1), std::max(one.answer, 1)));
      answers += one.answer;
      if (std::ssize(requests) == all) {
        break;
      }
    }
    return ceil_div(answers, together) > kRehearsedIterations ? std::vector<Request>{} : requests;
  }
  const std::int64_t tokens =
      rehearsal.most_tokens > 0 ? rehearsal.most_tokens / sequences : most * kBlockTokens;
  const std::int64_t prompt = std::clamp<std::int64_t>(rehearsal.prompt_rows / sequences, 1,
                                                       std::max<std::int64_t>(tokens - 1, 1));
  const std::int64_t answer = tokens - prompt + 1;
  if (ceil_div(all, together) * answer > kRehearsedIterations) {
    return {};
  }
  for (std::int64_t i = 1; i <= all; ++i) {
    requests.push_back(request_of(i, prompt, answer));
  }
  return requests;
}

}  // namespace

Rehearsed rehearse(const Profile& profile, const Policy& policy, const WeightLayout& layout,
                   const Rehearsal& rehearsal) {
  const Rehearsed early = rehearse_at(kEarly, true, profile, policy, layout, rehearsal);
  const Rehearsed late = rehearse_at(kLate, false, profile, policy, layout, rehearsal);
  return {.decoding = (early.decoding + late.decoding) * 0.5, .prefill = early.prefill};
}

std::optional<Seconds> rehearse_job(const Profile& profile, const Policy& policy,
                                    const WeightLayout& layout, const Rehearsal& rehearsal) {
  const std::vector<Request> requests = job_of(rehearsal);
  if (requests.empty()) {
    return std::nullopt;
  }
  Scheduler scheduler(policy, rehearsal.host,
                      {.max_num_seqs = rehearsal.sequences,
                       .prefill_rows = std::max(rehearsal.prefill_rows, 1),
                       .prompt_rows = rehearsal.prefill_rows_beside,
                       .sequence_rows = rehearsal.device.max_mini_batch_rows,
                       .kept = rehearsal.kept});
  for (const Request& request : requests) {
    scheduler.add(request);
  }
  OrderTables tables(rehearsal.host, rehearsal.windows, rehearsal.device.absorption);
  const PackingRule packing{.policy = policy, .host = rehearsal.host, .limits = rehearsal.pack};
  VirtualExecutor executor(profile, layout, rehearsal.device, rehearsal.windows);
  Seconds time{}, took{};  // `took`: the last iteration that was played, like all since
  Likeness played;
  std::int64_t since = 0;
  std::uint64_t iteration = 0;
  while (!scheduler.idle()) {
    const std::span<const ScheduledChunk> chunks = scheduler.next();
    const Likeness now = likeness_of(chunks);
    if (!now.like(played) || (++since >= kStride && !now.has_as_much_context(played))) {
      const Seconds before = executor.now();
      executor.run(plan_iteration(packing, chunks, tables, {.number = ++iteration}),
                   scheduler.last_iteration());
      took = executor.now() - before;
      played = now;
      since = 0;
    }
    time += took;
    scheduler.complete(any_outcomes(chunks));
  }
  return time;
}

}  // namespace poise
