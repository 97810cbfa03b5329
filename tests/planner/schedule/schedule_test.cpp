// Scheduler, policies, packing and orders together, run on symbols: whatever the policy, the pool,
// the chunks and the mini-batches, every request ends and its answer is that of a model that reads
// its text undisturbed.

#include "planner/schedule/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <random>

#include "common/trouble.h"
#include "planner/memory/policy_swap.h"
#include "planner/policies/packing.h"
#include "planner/schedule/iteration.h"
#include "planner/schedule/orders.h"
#include "tests/planner/schedule/symbolic_executor.h"

namespace poise {
namespace {

constexpr std::int32_t kMostAfterHandOver = 12;  // requests at a time, as the next planner may choose
constexpr TokenId kEnd = 7;  // as an EOS: the answer ends with it

Request request(std::uint32_t id, std::vector<TokenId> prompt, std::int32_t max_tokens) {
  Request r;
  r.id = {id};
  r.prompt = std::move(prompt);
  r.sampling.max_tokens = max_tokens;
  r.sampling.seed = id * 77;
  return r;
}

std::vector<Request> random_requests(std::mt19937& random, std::size_t count, int longest_prompt,
                                     int longest_answer) {
  std::vector<Request> requests;
  for (std::size_t i = 0; i < count; ++i) {
    std::vector<TokenId> prompt(1 + random() % static_cast<unsigned>(longest_prompt));
    for (TokenId& token : prompt) {
      token = static_cast<TokenId>(random() % kVocabulary);
    }
    Request r =
        request(static_cast<std::uint32_t>(i + 1), std::move(prompt),
                static_cast<std::int32_t>(random() % static_cast<unsigned>(longest_answer + 1)));
    r.sampling.echo = random() % 4 == 0 || r.sampling.max_tokens == 0;
    r.sampling.logprobs = r.sampling.echo ? 0 : -1;
    if (r.sampling.max_tokens == 0 && random() % 2 == 0) {
      r.sampling.score_from = 1 + static_cast<std::int32_t>(random() % r.prompt.size());
      r.scored_last = static_cast<TokenId>(random() % kVocabulary);
    }
    requests.push_back(std::move(r));
  }
  return requests;
}

// Most of them begin with some of the tokens of one of three texts.
void begin_alike(std::vector<Request>& requests, std::mt19937& random) {
  std::vector<std::vector<TokenId>> texts(3, std::vector<TokenId>(160));
  for (std::vector<TokenId>& text : texts) {
    std::ranges::generate(text, [&] { return static_cast<TokenId>(random() % kVocabulary); });
  }
  for (Request& request : requests) {
    std::vector<TokenId> prompt = request.prompt.get();
    const std::vector<TokenId>& text = texts[random() % 3];
    std::size_t alike = random() % 4 == 0 ? 0 : std::min(prompt.size(), random() % text.size());
    if (random() % 3 == 0) {  // few questions, many answers that are scored
      alike = 27;
      prompt.resize(28 + random() % 8, static_cast<TokenId>(random() % kVocabulary));
      request.sampling.max_tokens = 0;
      request.sampling.prompt_top = 1;
      request.sampling.score_from = static_cast<std::int32_t>(27 - random() % 2);
      request.scored_last = 1;
    }
    std::copy_n(text.begin(), alike, prompt.begin());
    request.prompt = std::move(prompt);
  }
}

// `window`: how much of the text each token hangs on; 0: all of it.
std::vector<TokenId> undisturbed_answer(const Request& request, std::int32_t window) {
  std::vector<TokenId> text = request.prompt, answer;
  while (static_cast<std::int32_t>(answer.size()) < request.sampling.max_tokens &&
         (answer.empty() || answer.back() != kEnd)) {
    const auto seen = static_cast<std::size_t>(window);
    const std::vector<TokenId> last(
        window > 0 && text.size() > seen ? text.end() - window : text.begin(), text.end());
    answer.push_back(symbolic_token(last, request.sampling.seed ^ answer.size()));
    text.push_back(answer.back());
  }
  return answer;
}

struct Setting {
  const char* policy = "kv-only";
  std::optional<double> act_share, recompute_share;
  Allocation host;
  ScheduleLimits schedule{.max_num_seqs = 16, .prefill_rows = 64, .sequence_rows = 32};
  PackLimits pack{.act_slots = 64, .kv_slots = 64, .tokens = 512, .rows = 48, .sequences = 8};
  bool absorption = false;  // rows of answers attend activations as they are
  // Called between two iterations; may put another scheduler and policy in place.
  std::function<void(std::unique_ptr<Policy>&, std::unique_ptr<Scheduler>&, Allocation& wished,
                     const std::set<std::uint32_t>& finished)>
      disturb;
  // Whether the iteration comes to nothing, and the device's blocks are lost with it.
  std::function<bool()> breaks;
  // Whether this request may run in the next iteration; nothing: all may.
  std::function<bool(RequestId)> may_run;
};

struct Outcomes {
  std::map<std::uint32_t, std::vector<TokenId>> answers;
  std::map<std::uint32_t, std::vector<TokenId>> echoed;  // targets, by position
  std::int64_t iterations = 0, preemptions = 0, most_running = 0, last_said = 0, host_rows = 0, dropped = 0;
  std::int64_t absorbed_rows = 0, rows = 0, shared_blocks = 0, parts = 0;
};

// Blocks of one size: the border between the kinds may be anywhere.
Allocation most_of_each(const Allocation& host) {
  Allocation most = host;
  most.act_blocks = most.kv_blocks = host.act_blocks + host.kv_blocks;
  return most;
}

Outcomes run(const std::vector<Request>& requests, const Setting& setting) {
  auto policy = make_policy(
      setting.policy, {.act_share = setting.act_share, .recompute_share = setting.recompute_share});
  auto held = std::make_unique<Scheduler>(*policy, setting.host, setting.schedule);
  Allocation wished = setting.host;
  const Allocation most = setting.disturb ? most_of_each(setting.host) : setting.host;
  const std::int32_t window = setting.schedule.kept.window;
  OrderTables order_tables(most, window > 0 ? LayerWindows{window} : LayerWindows(),
                           setting.absorption);
  SymbolicExecutor executor(most, setting.pack,
                            setting.schedule.prefill_rows +
                                (setting.disturb ? kMostAfterHandOver : setting.schedule.max_num_seqs) *
                                    setting.schedule.sequence_rows,
                            window, setting.absorption);
  std::map<std::uint32_t, const Request*> by_id;
  for (const Request& r : requests) {
    held->add(r);
    by_id[r.id.n] = &r;
    if (setting.schedule.share_prefixes) {
      executor.know(r);
    }
  }
  Outcomes all;
  std::set<std::uint32_t> finished;
  while (!held->idle() && !testing::Test::HasFatalFailure()) {
    if (setting.disturb) {
      setting.disturb(policy, held, wished, finished);
    }
    Scheduler& scheduler = *held;
    std::vector<RequestId> only;
    for (const Request& r : requests) {
      if (setting.may_run && setting.may_run(r.id)) {
        only.push_back(r.id);
      }
    }
    auto chunks = scheduler.next(only);
    for (const ScheduledChunk& chunk : chunks) {
      EXPECT_TRUE(only.empty() || std::ranges::find(only, chunk.request->request->id) != only.end())
          << "one ran that was to wait";
      all.rows += chunk.new_tokens;
    }
    if (chunks.empty()) {  // all of `only` are finished, or wait for memory
      chunks = scheduler.next();
    }
    EXPECT_TRUE(std::ranges::is_sorted(chunks, {}, [](const ScheduledChunk& chunk) {
      return chunk.request->request->id;
    })) << "a younger request was taken in before an older one";
    const auto items = pack_items(chunks);
    const auto batches =
        mini_batches_of({.policy = *policy, .host = wished, .limits = setting.pack}, items);
    for (const MiniBatchItems& batch : batches) {
      EXPECT_TRUE(within(setting.pack, items, batch));
    }
    const auto results = executor.run(order_tables.build(
        static_cast<std::uint64_t>(++all.iterations), 1, chunks, items, batches));
    if (setting.breaks && setting.breaks()) {
      executor.lose_device();
      scheduler.abandon(true);
      continue;
    }
    std::vector<Outcome> outcomes;
    for (const ScheduledChunk& chunk : chunks) {
      const Request& r = *chunk.request->request;
      const auto result = results.find(r.id.n);
      if (result != results.end()) {
        for (const auto& [position, target] : result->second.prompt_targets) {
          auto& echoed = all.echoed[r.id.n];
          EXPECT_EQ(echoed.size() + r.first_valued() - 1, position) << "each prompt value comes once and in order";
          echoed.push_back(target);
        }
      }
      if (!chunk.complete()) {
        continue;
      }
      Outcome outcome{.request = r.id, .token = std::nullopt};
      if (chunk.generates()) {
        auto& answer = all.answers[r.id.n];
        answer.push_back(result->second.token.value());
        if (answer.back() != kEnd &&
            static_cast<std::int32_t>(answer.size()) < r.sampling.max_tokens) {
          outcome.token = answer.back();
        }
      } else {
        all.answers[r.id.n];
      }
      if (!outcome.token) {
        finished.insert(r.id.n);
      }
      outcomes.push_back(outcome);
    }
    all.most_running = std::max(all.most_running, scheduler.running());
    const bool last = scheduler.last_iteration();
    std::ranges::reverse(outcomes);  // the executor's order is its own
    scheduler.complete(outcomes);
    EXPECT_TRUE(!last || scheduler.idle()) << "an iteration followed the last";
    all.last_said += last ? 1 : 0;
    if (all.iterations > 100'000) {
      ADD_FAILURE() << "the requests do not end";
      break;
    }
  }
  EXPECT_EQ(held->blocks().free(), held->blocks().total()) << "blocks were kept";
  all.preemptions = held->preemptions();
  all.host_rows = executor.host_rows();
  all.dropped = executor.dropped();
  all.absorbed_rows = executor.absorbed_rows();
  all.shared_blocks = executor.shared_blocks();
  all.parts = executor.parts();
  return all;
}

void expect_undisturbed(const std::vector<Request>& requests, const Outcomes& outcomes,
                        std::int32_t window = 0) {
  for (const Request& r : requests) {
    const auto answer = outcomes.answers.find(r.id.n);
    ASSERT_NE(answer, outcomes.answers.end()) << "request " << r.id.n << " has no answer";
    EXPECT_EQ(answer->second, undisturbed_answer(r, window)) << "request " << r.id.n;
    const auto echoed = outcomes.echoed.find(r.id.n);
    const std::vector<TokenId> targets =
        echoed == outcomes.echoed.end() ? std::vector<TokenId>{} : echoed->second;
    std::vector<TokenId> wanted;
    for (std::size_t place = r.first_valued();
         r.sampling.prompt_logprobs() && place < r.given_tokens(); ++place) {
      wanted.push_back(r.token_or_scored(place));
    }
    EXPECT_EQ(targets, wanted) << "request " << r.id.n;
  }
}

std::int32_t largest(const std::vector<Request>& requests) {
  std::int32_t blocks = 0;
  for (const Request& r : requests) {
    blocks = std::max(blocks, blocks_for(r.most_context()));
  }
  return blocks;
}

TEST(Schedule, AnswersDoNotDependOnPolicyPoolChunksOrMiniBatches) {
  std::int64_t preemptions = 0, hybrids = 0, recomputed = 0, host_rows = 0, dropped = 0, shared = 0;
  std::int64_t parts = 0, absorbed_rows = 0;
  for (std::uint32_t seed = 1; seed <= 280; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    const auto one_of = [&](std::uint32_t n) { return static_cast<std::int32_t>(random() % n); };
    // Every other one: short prompts and long answers on a small pool, so that blocks run out.
    const bool tight = seed % 2 == 0;
    // Some have no window and prompts that begin alike.
    const bool sharing = seed > 160;
    auto requests = random_requests(random, 1 + random() % 30,
                                    1 + one_of(tight && !sharing ? 20 : 120),
                                    tight ? 120 : one_of(60));
    if (sharing) {
      begin_alike(requests, random);
    }
    Setting setting;
    // In the last ones every layer has a window, and a pool may hold no more than that of one request.
    const KeptContext kept{.window = seed > 120 && !sharing ? 1 + one_of(60) : 0};
    const std::int32_t need = largest(requests);
    const std::uint32_t pool =
        static_cast<std::uint32_t>(kept.between(need) + one_of(tight ? 10 : 40));
    switch (one_of(5)) {
      case 0:
        setting.host = {.act_blocks = 0, .kv_blocks = pool};
        break;
      case 1:
        setting.policy = "act-only";
        setting.host = {.act_blocks = pool, .kv_blocks = 0};
        break;
      case 2:
        ++recomputed;
        setting.policy = "token-recompute";
        setting.recompute_share = one_of(11) / 10.0;
        setting.host = {.act_blocks = 0, .kv_blocks = pool + static_cast<std::uint32_t>(need)};
        break;
      case 3: {
        const char* names[] = {"optimal", "hybrid-static", "kvpr", "row-by-row"};
        setting.policy = names[one_of(4)];
        const auto act = static_cast<std::uint32_t>(one_of(static_cast<std::uint32_t>(pool)));
        setting.host = {.act_blocks = act, .kv_blocks = pool - act};
        break;
      }
      default: {
        ++hybrids;
        setting.policy = "hybrid";
        setting.act_share = one_of(11) / 10.0;
        const auto act = static_cast<std::uint32_t>(*setting.act_share * pool);
        setting.host = {.act_blocks = act, .kv_blocks = pool - act};
      }
    }
    if (setting.host.act_blocks > 0 && random() % 2 == 0) {  // some of them on the device
      setting.host.gpu_act_blocks = static_cast<std::uint32_t>(random()) % setting.host.act_blocks;
      setting.host.act_blocks -= setting.host.gpu_act_blocks;
    }
    if (setting.host.kv_blocks > 0 && random() % 2 == 0) {
      setting.host.gpu_kv_blocks = static_cast<std::uint32_t>(random()) % setting.host.kv_blocks;
      setting.host.kv_blocks -= setting.host.gpu_kv_blocks;
    }
    setting.host.host_share = seed % 3 == 0 ? one_of(5) / 4.0 : 0;  // some requests on host cores
    setting.schedule = {.max_num_seqs = 1 + one_of(20),
                        .prefill_rows = (sharing ? 20 : 1) + one_of(150),
                        .prompt_rows = (sharing ? 20 : 1) + one_of(60),
                        .sequence_rows = (sharing ? 12 : 1) + one_of(60),
                        .kept = kept,
                        .share_prefixes = sharing};
    if (setting.recompute_share) {  // their rows come in one mini-batch with the new ones
      setting.schedule.sequence_rows += need * kBlockTokens;
    }
    setting.pack = {.act_slots = need + one_of(20),
                    .kv_slots = need + one_of(20),
                    .tokens = 16 + one_of(600),
                    .rows = setting.schedule.sequence_rows + one_of(60),
                    .sequences = 2 + one_of(10)};
    setting.absorption = kept.window == 0 && !sharing && seed % 4 < 2;
    const Outcomes outcomes = run(requests, setting);
    expect_undisturbed(requests, outcomes, kept.window);
    absorbed_rows += outcomes.absorbed_rows;
    EXPECT_TRUE(setting.absorption || outcomes.absorbed_rows == 0);
    dropped += outcomes.dropped;
    preemptions += outcomes.preemptions;
    host_rows += outcomes.host_rows;
    shared += outcomes.shared_blocks;
    parts += outcomes.parts;
    EXPECT_TRUE(setting.host.host_share > 0 || outcomes.host_rows == 0);
  }
  EXPECT_GT(host_rows, 2000);
  EXPECT_GT(absorbed_rows, 10'000);
  EXPECT_GT(dropped, 2000);
  EXPECT_GT(shared, 1000);
  EXPECT_GT(parts, 10);
  // The cases above are worth nothing if they never come to the hard part.
  EXPECT_GT(preemptions, 50);
  EXPECT_GT(hybrids, 10);
  EXPECT_GT(recomputed, 10);
}

// Between iterations policies are swapped and the border follows, another scheduler goes on from what
// this one tells, and iterations come to nothing with the device they ran on.
TEST(Schedule, AnswersDoNotDependOnSwapsHandOversOrLostDevices) {
  std::int64_t swaps = 0, moves = 0, hand_overs = 0, breaks = 0, kept = 0, sent_back = 0;
  std::int64_t dropped = 0, shared = 0, parts = 0;
  const BlockSizes sizes{.kv_row = {1}, .act_row = {1}};
  for (std::uint32_t seed = 1; seed <= 140; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    const auto one_of = [&](int n) {
      return static_cast<std::int32_t>(random() % static_cast<unsigned>(n));
    };
    const bool sharing = seed > 80;
    auto requests = random_requests(random, static_cast<std::size_t>(1 + one_of(sharing ? 60 : 30)),
                                    1 + one_of(sharing ? 120 : 60), 80);
    if (sharing) {
      begin_alike(requests, random);
    }
    const std::int32_t window = seed > 60 && !sharing ? 1 + one_of(60) : 0;
    const std::int32_t need = largest(requests);
    const bool roomy = seed % 4 == 1;  // for whole contexts, however long
    const auto pool = static_cast<std::uint32_t>(
        (roomy ? need : KeptContext{window}.between(need)) + one_of(30));
    const auto here = static_cast<std::uint32_t>(one_of(3) * one_of(6));
    const auto kv_here = static_cast<std::uint32_t>(one_of(3) * one_of(6));
    PoolPartition border{
        .region_bytes = std::uint64_t{pool} * kBlockTokens, .act_blocks = 0, .kv_blocks = pool};
    Setting setting;
    setting.host = {
        .act_blocks = 0, .kv_blocks = pool, .gpu_act_blocks = here, .gpu_kv_blocks = kv_here};
    setting.schedule = {.max_num_seqs = 1 + one_of(12),
                        .prefill_rows = (sharing ? 20 : 1) + one_of(150),
                        .prompt_rows = (sharing ? 20 : 1) + one_of(60),
                        .sequence_rows = (sharing ? 12 : 1) + one_of(60),
                        .kept = {.window = window},
                        .share_prefixes = sharing};
    if (roomy) {
      setting.schedule.sequence_rows += need * kBlockTokens;
    }
    setting.pack = {.act_slots = need + one_of(20),
                    .kv_slots = need + one_of(20),
                    .tokens = 16 + one_of(600),
                    .rows = setting.schedule.sequence_rows + one_of(60),
                    .sequences = (roomy ? 2 : 1) + one_of(10)};
    // A prompt in chunks of one row may never get through while so much is lost, so in the end nothing is.
    int iterations = 0;
    setting.breaks = [&] {
      const bool breaks_now = ++iterations < 3000 && one_of(12) == 0;
      breaks += breaks_now ? 1 : 0;
      return breaks_now;
    };
    bool holds_back = false;
    setting.may_run = [&](RequestId id) {
      holds_back = id == RequestId{1} ? one_of(4) == 0 : holds_back;
      return holds_back && one_of(2) == 0;
    };
    setting.disturb = [&](std::unique_ptr<Policy>& policy, std::unique_ptr<Scheduler>& scheduler,
                          Allocation& wished, const std::set<std::uint32_t>& finished) {
      if (iterations >= 3000) {
        return;
      }
      if (one_of(6) == 0) {
        const char* names[] = {"kv-only",       "act-only",       "hybrid", "kvpr",
                               "hybrid-static", "token-recompute"};
        const double share = one_of(5) / 4.0;
        wished.act_blocks = static_cast<std::uint32_t>(share * pool);
        wished.kv_blocks = pool - wished.act_blocks;
        wished.host_share = seed % 2 == 0 ? one_of(3) / 2.0 : 0;
        const int name = one_of(roomy ? 6 : 5);
        auto another = make_policy(names[name], {});
        setting.schedule.kept.window = name == 5 ? 0 : window;  // rows run again need all between
        scheduler->use(*another, wished, setting.schedule);
        policy = std::move(another);
        ++swaps;
      }
      const PoolPartition next = border_toward(border, wished, scheduler->blocks(), sizes,
                                               KeptContext{window}.between(need));
      if (next.act_blocks != border.act_blocks) {
        scheduler->move_border(next.act_blocks, next.kv_blocks);
        border = next;
        ++moves;
      }
      if (one_of(10) == 0) {
        if (one_of(3) == 0) {  // the next planner chooses another number
          setting.schedule.max_num_seqs = 1 + one_of(kMostAfterHandOver);
        }
        const std::int64_t most = setting.schedule.max_num_seqs;
        const auto begun = scheduler->snapshots();
        auto another = std::make_unique<Scheduler>(*policy,
                                                   Allocation{.act_blocks = border.act_blocks,
                                                              .kv_blocks = border.kv_blocks,
                                                              .gpu_act_blocks = here,
                                                              .gpu_kv_blocks = kv_here},
                                                   setting.schedule);
        another->use(*policy, wished, setting.schedule);
        std::set<std::uint32_t> known = finished;
        std::int64_t given_up = 0;
        for (const Scheduler::Snapshot& one : begun) {
          const Request& again = requests[one.request.n - 1];
          const bool runs = one.running && another->running() < most;
          ASSERT_TRUE(another->restore(again, one));
          const std::int64_t without = std::ranges::count_if(one.blocks, [](const BlockRef& block) {
            return block.place == Place::dropped || block.place == Place::nowhere;
          });
          if (runs && !sharing) {
            EXPECT_TRUE(std::ssize(one.blocks) == without || another->running() == most ||
                        !another->restore(again, one))
                << "blocks were taken twice";
          }
          known.insert(one.request.n);
          kept += runs ? one.stored : 0;
          given_up += runs ? 0 : std::ssize(one.blocks) - without;
        }
        for (const Request& r : requests) {
          if (!known.contains(r.id.n)) {
            another->add(r);
          }
        }
        const std::int64_t too_many = std::max<std::int64_t>(0, scheduler->running() - most);
        EXPECT_EQ(another->running(), scheduler->running() - too_many);
        EXPECT_EQ(another->waiting(), scheduler->waiting() + too_many);
        if (sharing) {  // what was given up may be another's, too
          EXPECT_GE(another->blocks().free(), scheduler->blocks().free());
        } else {
          EXPECT_EQ(another->blocks().free(), scheduler->blocks().free() + given_up);
        }
        sent_back += too_many;
        scheduler = std::move(another);
        ++hand_overs;
      }
    };
    const Outcomes outcomes = run(requests, setting);
    expect_undisturbed(requests, outcomes, window);
    dropped += outcomes.dropped;
    shared += outcomes.shared_blocks;
    parts += outcomes.parts;
  }
  EXPECT_GT(dropped, 1000);
  EXPECT_GT(shared, 1000);
  EXPECT_GT(parts, 10);
  EXPECT_GT(swaps, 100);
  EXPECT_GT(moves, 100);
  EXPECT_GT(breaks, 100);
  EXPECT_GT(hand_overs, 100);
  EXPECT_GT(kept, 1000) << "nothing was handed over";
  EXPECT_GT(sent_back, 20);
}

// Of ten blocks every other one lies on the device. Once that is gone the rows of those run again, in the
// blocks they were in; the others, before and behind them, stay.
TEST(Schedule, ALostDeviceCostsTheRowsOfItsBlocksAlone) {
  const auto policy = make_policy("hybrid", {});
  const Allocation host{.act_blocks = 10, .kv_blocks = 10, .gpu_act_blocks = 10};
  Scheduler scheduler(*policy, host,
                      {.max_num_seqs = 1, .prefill_rows = 400, .sequence_rows = 400});
  const Request one = request(1, std::vector<TokenId>(156, 1), 8);
  scheduler.add(one);
  const auto generates = std::vector<Outcome>{{.request = one.id, .token = 2}};
  scheduler.next();
  scheduler.complete(generates);
  ASSERT_EQ(scheduler.next().front().context, 156);
  scheduler.complete(generates);
  const std::vector<BlockRef> blocks = scheduler.snapshots().front().blocks;
  std::int32_t lost = 0;
  for (const BlockRef& block : blocks) {
    lost += block.place == Place::gpu ? 1 : 0;
  }
  ASSERT_GT(lost, 2);
  ASSERT_LT(lost, 9);
  scheduler.next();
  scheduler.abandon(true);
  EXPECT_EQ(scheduler.snapshots().front().lost.size(), static_cast<std::size_t>(lost));
  std::int32_t rows = 0;
  while (true) {
    const ScheduledChunk chunk = scheduler.next().front();
    if (chunk.context == 157) {
      EXPECT_TRUE(chunk.complete());
      break;
    }
    EXPECT_FALSE(chunk.complete()) << "no token is sampled twice";
    for (std::int32_t at = chunk.context; at < chunk.context + chunk.new_tokens; ++at) {
      EXPECT_EQ(blocks[static_cast<std::size_t>(at / kBlockTokens)].place, Place::gpu) << at;
    }
    rows += chunk.new_tokens;
    scheduler.complete({});
  }
  EXPECT_EQ(rows, lost * kBlockTokens - (blocks.back().place == Place::gpu ? 3 : 0));
  scheduler.complete(generates);
  EXPECT_EQ(scheduler.snapshots().front().blocks, blocks);
  EXPECT_TRUE(scheduler.snapshots().front().lost.empty());
}

// A prompt of 3,000 tokens and an answer of 500, in a window of 100: between iterations there are never more than
// eight blocks, and during the prompt's parts no more than the window's and the part's.
TEST(Schedule, AWindowBoundsTheMemoryOfARequestHoweverLongItIs) {
  const auto policy = make_policy("kv-only", {});
  const KeptContext kept{.window = 100};
  Scheduler scheduler(*policy, {.act_blocks = 0, .kv_blocks = 300},
                      {.max_num_seqs = 1, .prefill_rows = 400, .sequence_rows = 400, .kept = kept});
  const Request one = request(1, std::vector<TokenId>(3000, 1), 500);
  scheduler.add(one);
  std::int64_t most = 0, between = 0, rows = 0;
  while (!scheduler.idle()) {
    const auto chunks = scheduler.next();
    rows += chunks[0].new_tokens;
    const auto taken = [&] { return scheduler.blocks().total() - scheduler.blocks().free(); };
    most = std::max(most, taken());
    scheduler.complete(any_outcomes(chunks));
    between = std::max(between, taken());
  }
  EXPECT_EQ(rows, 3499) << "no row ran twice";
  EXPECT_LE(between, kept.between(INT32_MAX));
  EXPECT_EQ(kept.between(INT32_MAX), 8);
  EXPECT_LE(most, kept.at_most(INT32_MAX));
  EXPECT_EQ(kept.at_most(INT32_MAX), 24);
}

// In a pool for two whole requests eight run at a time, and none gives its blocks back.
TEST(Schedule, MoreRequestsRunAtATimeWhereTheirWindowsAreKeptAlone) {
  const auto policy = make_policy("kv-only", {});
  const auto most_running = [&](std::int32_t window) {
    Scheduler scheduler(
        *policy, {.act_blocks = 0, .kv_blocks = 64},
        {.max_num_seqs = 20, .prefill_rows = 64, .sequence_rows = 64, .kept = {.window = window}});
    std::vector<Request> requests;
    for (std::uint32_t id = 1; id <= 20; ++id) {
      requests.push_back(request(id, std::vector<TokenId>(300, 1), 200));
    }
    for (const Request& r : requests) {
      scheduler.add(r);
    }
    std::int64_t most = 0;
    while (!scheduler.idle()) {
      const auto chunks = scheduler.next();
      most = std::max(most, scheduler.running());
      scheduler.complete(any_outcomes(chunks));
    }
    return std::pair(most, scheduler.preemptions());
  };
  EXPECT_LE(most_running(0).first, 4);
  EXPECT_GE(most_running(100).first, 7);
  EXPECT_EQ(most_running(100).second, 0);
}

// Its rows would see blocks that were dropped: the request runs again from its first token. One whose lost rows see
// none of those goes on.
TEST(Schedule, ALostDeviceWhoseRowsSeeDroppedBlocksMakesARequestBeginAgain) {
  const auto policy = make_policy("kv-only", {});
  const Request one = request(1, std::vector<TokenId>(300, 1), 8);
  const auto after_loss = [&](const Allocation& host) {
    Scheduler scheduler(*policy, host,
                        {.max_num_seqs = 1, .prefill_rows = 400, .sequence_rows = 400,
                         .kept = {.window = 64}});
    scheduler.add(one);
    while (!scheduler.next().front().complete()) {
      scheduler.complete({});
    }
    scheduler.complete(std::vector<Outcome>{{.request = one.id, .token = 2}});
    scheduler.next();
    scheduler.abandon(true);
    const Scheduler::Snapshot begun = scheduler.snapshots().front();
    return std::pair(begun, scheduler.next().front().context);
  };
  const auto [begun, context] = after_loss({.act_blocks = 0, .kv_blocks = 4, .gpu_kv_blocks = 40});
  EXPECT_EQ(context, 0);
  EXPECT_TRUE(begun.lost.empty());
  EXPECT_EQ(begun.prompt_values, 300);
  const auto [kept, goes_on] = after_loss({.act_blocks = 0, .kv_blocks = 40, .gpu_kv_blocks = 0});
  EXPECT_EQ(goes_on, 300);
  EXPECT_EQ(kept.blocks.front().place, Place::dropped);
}

TEST(Schedule, EveryRequestHasTheSameShareOfItsActBlocksOnTheDevice) {
  const auto policy = make_policy("act-only", {});
  const Allocation host{.act_blocks = 90, .kv_blocks = 0, .gpu_act_blocks = 30};
  Scheduler scheduler(*policy, host,
                      {.max_num_seqs = 4, .prefill_rows = 4000, .sequence_rows = 4000});
  std::vector<Request> requests;
  for (std::uint32_t id = 1; id <= 4; ++id) {
    requests.push_back(request(id, std::vector<TokenId>(16 * 7 * id, 1), 8));
  }
  for (const Request& r : requests) {
    scheduler.add(r);
  }
  const auto chunks = scheduler.next();
  ASSERT_EQ(chunks.size(), 4u);
  for (const ScheduledChunk& chunk : chunks) {
    const ContextBlocks& context = chunk.request->context;
    EXPECT_NEAR(context.count(BlockKind::act, Place::gpu), context.size() / 4.0, 1);
  }
}

TEST(Schedule, ManyRequestsOnAPoolForOneAllEnd) {
  std::mt19937 random(5);
  const auto requests = random_requests(random, 60, 90, 40);
  Setting setting;
  setting.policy = "hybrid";
  setting.host = {.act_blocks = 3, .kv_blocks = static_cast<std::uint32_t>(largest(requests)) - 3};
  const Outcomes outcomes = run(requests, setting);
  expect_undisturbed(requests, outcomes);
}

TEST(Schedule, WithRoomForAllNoRequestIsPreempted) {
  std::mt19937 random(6);
  const auto requests = random_requests(random, 40, 90, 60);
  Setting setting;
  std::int64_t blocks = 0;
  for (const Request& r : requests) {
    blocks += blocks_for(r.most_context());
  }
  setting.host.kv_blocks = static_cast<std::uint32_t>(blocks);
  setting.schedule.max_num_seqs = 40;
  setting.schedule.prefill_rows = 4000;
  setting.schedule.sequence_rows = setting.pack.rows = 200;
  const Outcomes outcomes = run(requests, setting);
  EXPECT_EQ(outcomes.preemptions, 0);
  EXPECT_EQ(outcomes.most_running, 40);
  expect_undisturbed(requests, outcomes);
}

TEST(Schedule, AFinishedRequestsPlaceIsTakenInTheNextIteration) {
  std::vector<Request> requests;
  for (std::uint32_t id = 1; id <= 3; ++id) {
    requests.push_back(request(id, {1, 2, 3}, id == 1 ? 1 : 20));
  }
  const auto policy = make_policy("kv-only", {});
  Scheduler scheduler(*policy, {.act_blocks = 0, .kv_blocks = 100},
                      {.max_num_seqs = 2, .prefill_rows = 100, .sequence_rows = 100});
  for (const Request& r : requests) {
    scheduler.add(r);
  }
  ASSERT_EQ(scheduler.next().size(), 2u);
  scheduler.complete(
      std::vector<Outcome>{{.request = {1}, .token = std::nullopt}, {.request = {2}, .token = 4}});
  const auto chunks = scheduler.next();
  ASSERT_EQ(chunks.size(), 2u);
  EXPECT_EQ(chunks[0].request->request->id, RequestId{2});
  EXPECT_EQ(chunks[0].new_tokens, 1);
  EXPECT_EQ(chunks[1].request->request->id, RequestId{3});
  EXPECT_EQ(chunks[1].new_tokens, 3);
}

TEST(Schedule, ARequestThatIsTakenOutLeavesItsBlocksAndPlace) {
  std::vector<Request> requests;
  for (std::uint32_t id = 1; id <= 4; ++id) {
    requests.push_back(request(id, std::vector<TokenId>(40, 3), 20));
  }
  const auto policy = make_policy("kv-only", {});
  Scheduler scheduler(*policy, {.act_blocks = 0, .kv_blocks = 100},
                      {.max_num_seqs = 2, .prefill_rows = 200, .sequence_rows = 100});
  for (const Request& r : requests) {
    scheduler.add(r);
  }
  scheduler.next();
  scheduler.complete(
      std::vector<Outcome>{{.request = {1}, .token = 5}, {.request = {2}, .token = 4}});
  EXPECT_EQ(scheduler.blocks().free(), 94);
  scheduler.remove({2});
  scheduler.remove({3});
  EXPECT_EQ(scheduler.blocks().free(), 97);
  const auto chunks = scheduler.next();
  ASSERT_EQ(chunks.size(), 2u);
  EXPECT_EQ(chunks[0].request->request->id, RequestId{1});
  EXPECT_EQ(chunks[1].request->request->id, RequestId{4});
}

TEST(Schedule, APromptLongerThanAWaveRunsInChunksBesideThoseThatGenerate) {
  std::vector<Request> requests{request(1, {1, 2, 3}, 10),
                                request(2, std::vector<TokenId>(250, 5), 4)};
  const auto policy = make_policy("kv-only", {});
  Scheduler scheduler(*policy, {.act_blocks = 0, .kv_blocks = 100},
                      {.max_num_seqs = 8, .prefill_rows = 100, .sequence_rows = 80});
  for (const Request& r : requests) {
    scheduler.add(r);
  }
  std::vector<std::int32_t> chunks;
  for (int i = 0; i < 4; ++i) {
    std::vector<Outcome> outcomes;
    for (const ScheduledChunk& chunk : scheduler.next()) {
      if (chunk.request->request->id == RequestId{2}) {
        chunks.push_back(chunk.new_tokens);
      } else {
        EXPECT_EQ(chunk.new_tokens, i == 0 ? 3 : 1);
      }
      if (chunk.complete()) {
        outcomes.push_back({.request = chunk.request->request->id, .token = 9});
      }
    }
    scheduler.complete(outcomes);
  }
  EXPECT_EQ(chunks, (std::vector<std::int32_t>{80, 80, 80, 10}));
}

// 40 requests of 20 + 20 tokens, 16 at a time.
TEST(Schedule, PromptsRunInSmallPartsBesideAnswersSoThatRequestsDoNotAllEndTogether) {
  const auto policy = make_policy("kv-only", {});
  std::vector<Request> requests;
  for (std::uint32_t i = 1; i <= 40; ++i) {
    requests.push_back(request(i, std::vector<TokenId>(20, 1), 20));
  }
  const auto iterations_with_both = [&](std::int32_t prompt_rows) {
    Scheduler scheduler(*policy, {.kv_blocks = 100},
                        {.max_num_seqs = 16,
                         .prefill_rows = 160,
                         .prompt_rows = prompt_rows,
                         .sequence_rows = 160});
    for (const Request& one : requests) {
      scheduler.add(one);
    }
    int both = 0;
    while (!scheduler.idle()) {
      const auto chunks = scheduler.next();
      std::int32_t prompts = 0, answers = 0;
      for (const ScheduledChunk& chunk : chunks) {
        (chunk.new_tokens > 1 ? prompts : answers) += chunk.new_tokens;
      }
      EXPECT_LE(prompts, answers < 2 ? 160 : prompt_rows) << answers << " generate";
      both += prompts > 0 && answers > 0 ? 1 : 0;
      scheduler.complete(any_outcomes(chunks));
    }
    EXPECT_EQ(scheduler.preemptions(), 0);
    return both;
  };
  EXPECT_LE(iterations_with_both(160), 6);
  EXPECT_GE(iterations_with_both(20), 25);
}

// Pools that hold some of the requests under way at their ends: a request that begins later finds what those that
// ended gave back.
TEST(Schedule, StartsOneAfterTheOtherTakeBlocksFromNoMoreRequests) {
  const auto policy = make_policy("kv-only", {});
  std::vector<Request> requests;
  for (std::uint32_t i = 1; i <= 60; ++i) {
    requests.push_back(request(i, std::vector<TokenId>(100, 1), 60));
  }
  const auto preemptions = [&](std::uint32_t blocks, std::int32_t prompt_rows) {
    Scheduler scheduler(*policy, {.kv_blocks = blocks},
                        {.max_num_seqs = 16,
                         .prefill_rows = 800,
                         .prompt_rows = prompt_rows,
                         .sequence_rows = 800});
    for (const Request& one : requests) {
      scheduler.add(one);
    }
    while (!scheduler.idle()) {
      scheduler.complete(any_outcomes(scheduler.next()));
    }
    return scheduler.preemptions();
  };
  for (const std::int32_t rows : {50, 100, 200}) {
    std::int64_t one_by_one = 0, together = 0;
    for (std::uint32_t blocks = 20; blocks <= 160; blocks += 10) {
      const std::int64_t now = preemptions(blocks, rows), before = preemptions(blocks, 800);
      EXPECT_LE(now, before + 1) << blocks << " blocks, " << rows << " rows";
      one_by_one += now;
      together += before;
    }
    EXPECT_LE(one_by_one, together) << rows << " rows";
  }
}

TEST(Schedule, ARequestWhoseEditsFindNoRoomWaitsUntilAnOlderOneHasEnded) {
  LogitWishes wishes;
  wishes.constant = {{1, 1.0f}, {2, 1.0f}, {3, 1.0f}, {4, 1.0f}};
  std::vector<Request> requests;
  for (std::uint32_t id = 1; id <= 4; ++id) {
    requests.push_back(request(id, {5, 6}, 2));
    if (id != 3) {
      requests.back().sampling.wishes = std::make_shared<const LogitWishes>(wishes);
    }
  }
  const auto policy = make_policy("kv-only", {});
  for (const std::int64_t edits : {3, 7, 8}) {  // one always has room
    SCOPED_TRACE(edits);
    Scheduler scheduler(*policy, {.act_blocks = 0, .kv_blocks = 100},
                        {.max_num_seqs = 8, .prefill_rows = 200, .sequence_rows = 200, .edits = edits});
    for (const Request& r : requests) {
      scheduler.add(r);
    }
    const auto run = [&](const std::vector<std::uint32_t>& expected, bool ends) {
      std::vector<std::uint32_t> ids;
      std::vector<Outcome> outcomes;
      for (const ScheduledChunk& chunk : scheduler.next()) {
        ids.push_back(chunk.request->request->id.n);
        outcomes.push_back({.request = {ids.back()}});
        if (!ends) {
          outcomes.back().token = 9;
        }
      }
      EXPECT_EQ(ids, expected);
      scheduler.complete(outcomes);
    };
    const bool two = edits == 8;
    run(two ? std::vector{1u, 2u, 3u} : std::vector{1u, 3u}, false);
    run(two ? std::vector{1u, 2u, 3u} : std::vector{1u, 3u}, true);
    if (!two) {
      run({2}, false);
      run({2}, true);
    }
    run({4}, true);
    EXPECT_TRUE(scheduler.idle());
  }
}

TEST(Schedule, TheYoungestGivesItsBlocksBackAndTheOldestGoesOn) {
  // Two requests of 16 + 17 tokens on five blocks: both begin, only one can have three blocks.
  std::vector<Request> requests;
  for (std::uint32_t id = 1; id <= 2; ++id) {
    requests.push_back(request(id, std::vector<TokenId>(16, 3), 33));
  }
  Setting setting;
  setting.host.kv_blocks = 5;
  const Outcomes outcomes = run(requests, setting);
  EXPECT_EQ(outcomes.most_running, 2);
  EXPECT_EQ(outcomes.preemptions, 0) << "who finds no block waits while an older one can go on";
  setting.host.kv_blocks = 4;
  const Outcomes tighter = run(requests, setting);
  EXPECT_EQ(tighter.preemptions, 1);
  expect_undisturbed(requests, outcomes);
  expect_undisturbed(requests, tighter);
}

TEST(Schedule, ARequestTakesBlocksFromYoungerOnesAndNeverFromOlderOnes) {
  // On six blocks; the first request reaches the end of each of its blocks an iteration before the others.
  const std::vector<Request> requests{request(1, {3}, 64),
                                      request(2, std::vector<TokenId>(16, 3), 64),
                                      request(3, std::vector<TokenId>(16, 3), 64)};
  const auto policy = make_policy("kv-only", {});
  Scheduler scheduler(*policy, {.act_blocks = 0, .kv_blocks = 6},
                      {.max_num_seqs = 8, .prefill_rows = 100, .sequence_rows = 80});
  for (const Request& r : requests) {
    scheduler.add(r);
  }
  std::int32_t iteration = 0;
  // Runs iterations up to this one; returns who ran in it.
  const auto run_to = [&](std::int32_t last) {
    std::vector<std::uint32_t> ran;
    for (; iteration < last; ++iteration) {
      std::vector<Outcome> outcomes;
      ran.clear();
      for (const ScheduledChunk& chunk : scheduler.next()) {
        ran.push_back(chunk.request->request->id.n);
        outcomes.push_back({.request = chunk.request->request->id, .token = 9});
      }
      scheduler.complete(outcomes);
    }
    return ran;
  };
  using Ids = std::vector<std::uint32_t>;
  EXPECT_EQ(run_to(17), (Ids{1, 2, 3})) << "two blocks each: none is free";
  EXPECT_EQ(run_to(18), (Ids{1, 2})) << "the second is not the oldest, and takes from the third";
  EXPECT_EQ(scheduler.preemptions(), 1);
  EXPECT_EQ(run_to(33), (Ids{1, 2})) << "three blocks each: none is free";
  EXPECT_EQ(run_to(34), (Ids{1})) << "the second is now the youngest, and waits";
  EXPECT_EQ(run_to(48), (Ids{1}));
  EXPECT_EQ(scheduler.preemptions(), 1) << "it does not take from the first, and keeps its blocks";
  EXPECT_EQ(scheduler.blocks().free(), 0);
  EXPECT_EQ(run_to(49), (Ids{1})) << "the first takes from the second";
  EXPECT_EQ(scheduler.preemptions(), 2);
}

TEST(Schedule, ARequestThatFitsNoPoolIsADefect) {
  const auto policy = make_policy("kv-only", {});
  Scheduler scheduler(*policy, {.act_blocks = 0, .kv_blocks = 2},
                      {.max_num_seqs = 8, .prefill_rows = 100, .sequence_rows = 80});
  const Request r = request(1, std::vector<TokenId>(32, 1), 2);
  EXPECT_THROW(scheduler.add(r), Defect);
}

TEST(Schedule, TheLastIterationIsKnownWhereNoStopTokenComes) {
  std::vector<Request> requests{request(1, {1, 2}, 5), request(2, {4}, 3)};
  Setting setting;
  setting.host.kv_blocks = 10;
  EXPECT_EQ(run(requests, setting).last_said, 1);
}

TEST(Orders, NeighbouringBlocksAreLoadedAsOneRun) {
  std::vector<Request> requests{request(1, std::vector<TokenId>(100, 5), 4)};
  const auto policy = make_policy("kv-only", {});
  Scheduler scheduler(*policy, {.act_blocks = 0, .kv_blocks = 100},
                      {.max_num_seqs = 8, .prefill_rows = 200, .sequence_rows = 200});
  scheduler.add(requests[0]);
  scheduler.next();
  scheduler.complete(std::vector<Outcome>{{.request = {1}, .token = 9}});
  const auto chunks = scheduler.next();
  const auto tables =
      OrderTables({.act_blocks = 0, .kv_blocks = 100})
          .build(2, 1, chunks, pack_items(chunks), std::vector<MiniBatchItems>{{0}});
  const auto& loads = tables.mini_batches.at(0)->loads;
  ASSERT_EQ(loads.size(), 1u);
  EXPECT_EQ(loads[0].count(), 7u);
  EXPECT_EQ(loads[0].tail_tokens(), 4);
  EXPECT_TRUE(tables.mini_batches[0]->regenerate.empty());
}

TEST(Orders, NeighboursOfDifferentRequestsAreOneRun) {
  // Each request's second block comes after all first ones: 0 1 2, then 3 4 5 beside one another.
  std::vector<Request> requests;
  std::vector<Outcome> outcomes;
  for (std::uint32_t id = 1; id <= 3; ++id) {
    requests.push_back(request(id, std::vector<TokenId>(16, 5), 40));
    outcomes.push_back({.request = {id}, .token = 9});
  }
  const auto policy = make_policy("kv-only", {});
  Scheduler scheduler(*policy, {.act_blocks = 0, .kv_blocks = 100},
                      {.max_num_seqs = 8, .prefill_rows = 200, .sequence_rows = 200});
  for (const Request& r : requests) {
    scheduler.add(r);
  }
  for (int i = 0; i < 17; ++i) {
    scheduler.next();
    scheduler.complete(outcomes);
  }
  const auto chunks = scheduler.next();
  const auto tables =
      OrderTables({.act_blocks = 0, .kv_blocks = 100})
          .build(2, 1, chunks, pack_items(chunks), std::vector<MiniBatchItems>{{2, 0, 1}});
  const auto& loads = tables.mini_batches.at(0)->loads;
  ASSERT_EQ(loads.size(), 1u);
  EXPECT_EQ(loads[0].count(), 6u);
}

TEST(Orders, WhatIsRegeneratedIsOneRange) {
  std::vector<Request> requests;
  for (std::uint32_t id = 1; id <= 4; ++id) {
    requests.push_back(request(id, std::vector<TokenId>(16 * id, 5), 4));
  }
  const auto policy = make_policy("act-only", {});
  Scheduler scheduler(*policy, {.act_blocks = 100, .kv_blocks = 0},
                      {.max_num_seqs = 8, .prefill_rows = 200, .sequence_rows = 200});
  std::vector<Outcome> outcomes;
  for (const Request& r : requests) {
    scheduler.add(r);
    outcomes.push_back({.request = r.id, .token = 9});
  }
  scheduler.next();
  scheduler.complete(outcomes);
  const auto chunks = scheduler.next();
  const auto tables =
      OrderTables({.act_blocks = 100, .kv_blocks = 0})
          .build(2, 1, chunks, pack_items(chunks), std::vector<MiniBatchItems>{{0, 1, 2, 3}});
  const auto& ranges = tables.mini_batches.at(0)->regenerate;
  ASSERT_EQ(ranges.size(), 1u);
  EXPECT_EQ(ranges[0].first_slot(), 0u);
  EXPECT_EQ(ranges[0].count(), 10u);  // 1 + 2 + 3 + 4; the four new blocks hold nothing yet
}

}  // namespace
}  // namespace poise
