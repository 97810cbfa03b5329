// Requests whose prompts begin alike: what is computed once, who waits for whom, and what is not shared.

#include "planner/schedule/prefix_sharing.h"

#include <gtest/gtest.h>

#include <map>
#include <numeric>

#include "planner/policies/policy.h"
#include "planner/schedule/iteration.h"
#include "planner/schedule/orders.h"
#include "planner/schedule/schedule.h"

namespace poise {
namespace {

constexpr Allocation kPool{.act_blocks = 0, .kv_blocks = 100};
constexpr ScheduleLimits kSharing{
    .max_num_seqs = 16, .prefill_rows = 400, .sequence_rows = 400, .share_prefixes = true};

// `alike` tokens that all of them have, and then `own` that no other has.
Request prompt_of(std::uint32_t id, std::int32_t alike, std::int32_t own, std::int32_t answer = 1) {
  std::vector<TokenId> prompt(static_cast<std::size_t>(alike + own));
  std::iota(prompt.begin(), prompt.begin() + alike, 1);
  std::fill(prompt.begin() + alike, prompt.end(), static_cast<TokenId>(1000 + id));
  Request request;
  request.id = {id};
  request.prompt = std::move(prompt);
  request.sampling.max_tokens = answer;
  return request;
}

// One of several answers to a question of 15 tokens, of which it only wants the score.
Request scored(std::uint32_t id) {
  Request request = prompt_of(id, 15, 7, 0);
  request.sampling.prompt_top = 1;
  request.sampling.score_from = 15;
  request.scored_last = 1;
  return request;
}

// Runs all of them to their ends; rows that each request ran, in each iteration.
class Played {
 public:
  Played(std::vector<Request> requests, const Allocation& pool, const ScheduleLimits& limits)
      : policy_(make_policy("kv-only", {})),
        requests_(std::move(requests)),
        scheduler(*policy_, pool, limits) {
    for (const Request& request : requests_) {
      scheduler.add(request);
    }
  }
  // One iteration.
  std::map<std::uint32_t, std::int32_t> step() {
    const auto chunks = scheduler.next();
    std::map<std::uint32_t, std::int32_t> rows;
    for (const ScheduledChunk& chunk : chunks) {
      rows[chunk.request->request->id.n] = chunk.new_tokens;
      all_rows += chunk.new_tokens;
    }
    most_running = std::max(most_running, scheduler.running());
    scheduler.complete(any_outcomes(chunks));
    return rows;
  }
  void finish() {
    while (!scheduler.idle()) {
      step();
    }
  }

 private:
  std::unique_ptr<Policy> policy_;
  std::vector<Request> requests_;

 public:
  Scheduler scheduler;
  std::int64_t all_rows = 0, most_running = 0;
};

TEST(PrefixSharing, FourContinuationsOfOneContextComputeItOnce) {
  const std::vector<Request> requests{prompt_of(1, 70, 10), prompt_of(2, 70, 10),
                                      prompt_of(3, 70, 10), prompt_of(4, 70, 10)};
  Played played(requests, kPool, kSharing);
  using Rows = std::map<std::uint32_t, std::int32_t>;
  EXPECT_EQ(played.step(), (Rows{{1, 80}})) << "the others wait for it";
  EXPECT_EQ(played.step(), (Rows{{2, 16}, {3, 16}, {4, 16}})) << "four full blocks are there";
  EXPECT_TRUE(played.scheduler.idle());
  EXPECT_EQ(played.scheduler.shared_tokens(), 3 * 64);
  EXPECT_EQ(played.scheduler.blocks().free(), 100);
}

// All of the older ones end in the first iteration, and the blocks they give back are the first to be taken.
TEST(PrefixSharing, BlocksThatAreWaitedForAreNotTakenBeforeTheyAreTakenOver) {
  std::vector<Request> requests;
  for (std::uint32_t question = 0; question < 6; ++question) {
    for (std::uint32_t answer = 1; answer <= 4; ++answer) {
      Request request = prompt_of(4 * question + answer, 65, 8, 0);
      std::vector<TokenId> prompt = request.prompt.get();
      prompt[0] = static_cast<TokenId>(500 + question);
      request.prompt = std::move(prompt);
      requests.push_back(std::move(request));
    }
  }
  ScheduleLimits limits = kSharing;
  limits.max_num_seqs = 24;
  limits.prefill_rows = 1000;
  Played played(std::move(requests), {.act_blocks = 0, .kv_blocks = 120}, limits);
  EXPECT_EQ(played.step().size(), 6u);
  EXPECT_EQ(played.step().size(), 18u);
  EXPECT_EQ(played.all_rows, 6 * 73 + 18 * 9);
  EXPECT_TRUE(played.scheduler.idle());
}

TEST(PrefixSharing, WithoutTheOptionEveryPromptIsComputed) {
  ScheduleLimits limits = kSharing;
  limits.share_prefixes = false;
  Played played({prompt_of(1, 70, 10), prompt_of(2, 70, 10)}, kPool, limits);
  played.finish();
  EXPECT_EQ(played.all_rows, 160);
}

// At least its last row runs, since the next token is sampled behind it.
TEST(PrefixSharing, TwoEqualPromptsOfWholeBlocksShareAllButTheLast) {
  Played played({prompt_of(1, 64, 0), prompt_of(2, 64, 0)}, kPool, kSharing);
  played.finish();
  EXPECT_EQ(played.all_rows, 64 + 16);
}

TEST(PrefixSharing, ARequestDoesNotWaitForLittle) {
  Played played({prompt_of(1, 16, 10), prompt_of(2, 16, 300)}, kPool, kSharing);
  EXPECT_EQ(played.step().size(), 2u) << "a block of 20 is not worth an iteration";
}

// Each prompt is the one before and a block more. If each waited for the one before, the last would
// run in the fortieth iteration.
TEST(PrefixSharing, AChainOfPromptsDoesNotRunOneByOne) {
  std::vector<Request> requests;
  for (std::uint32_t id = 1; id <= 40; ++id) {
    requests.push_back(prompt_of(id, static_cast<std::int32_t>(16 * id), 1));
  }
  ScheduleLimits limits = kSharing;
  limits.max_num_seqs = 40;
  limits.prefill_rows = limits.sequence_rows = 100'000;
  Played played(requests, {.act_blocks = 0, .kv_blocks = 2000}, limits);
  std::int32_t iterations = 0;
  for (; !played.scheduler.idle(); ++iterations) {
    played.step();
  }
  EXPECT_LE(iterations, 16);
}

TEST(PrefixSharing, BlocksOfAFinishedRequestAreTakenOverUntilTheyAreTakenAnew) {
  Played played({prompt_of(1, 64, 4)}, kPool, kSharing);
  played.finish();
  const Request second = prompt_of(2, 64, 4), other = prompt_of(3, 0, 1600, 0),
                third = prompt_of(4, 64, 4);
  played.scheduler.add(second);
  EXPECT_EQ(played.step(), (std::map<std::uint32_t, std::int32_t>{{2, 4}}));
  played.scheduler.add(other);  // takes every block
  played.finish();
  played.scheduler.add(third);
  EXPECT_EQ(played.step(), (std::map<std::uint32_t, std::int32_t>{{4, 68}}));
}

TEST(PrefixSharing, AWaitingRequestRunsOnceTheOneItWaitsForIsGone) {
  const std::vector<Request> requests{prompt_of(1, 600, 4), prompt_of(2, 600, 4)};
  ScheduleLimits limits = kSharing;
  limits.sequence_rows = 100;
  Played played(requests, kPool, limits);
  EXPECT_EQ(played.step(), (std::map<std::uint32_t, std::int32_t>{{1, 100}}));
  played.scheduler.remove({1});
  EXPECT_EQ(played.step(), (std::map<std::uint32_t, std::int32_t>{{2, 100}}));
  EXPECT_EQ(played.scheduler.shared_tokens(), 96);
  played.finish();
}

// The one it waits for may not run in this iteration, so it does not wait.
TEST(PrefixSharing, ARequestThatRunsAloneWaitsForNone) {
  Played played({prompt_of(1, 64, 4), prompt_of(2, 64, 4)}, kPool, kSharing);
  const std::vector<RequestId> only{{2}};
  const auto chunks = played.scheduler.next(only);
  ASSERT_EQ(chunks.size(), 1u);
  EXPECT_EQ(chunks[0].request->request->id, RequestId{2});
  EXPECT_EQ(chunks[0].new_tokens, 68);
}

TEST(PrefixSharing, RowsWhoseValuesAreWantedAreComputed) {
  Request scored = prompt_of(2, 70, 10, 0);
  scored.sampling.prompt_top = 1;
  Request tail = scored;
  tail.id = {3};
  tail.sampling.score_from = 40;  // the row before it gives the first value
  Played played({prompt_of(1, 70, 10), scored, tail}, kPool, kSharing);
  played.finish();
  EXPECT_EQ(played.all_rows, 80 + 80 + (80 - 32));
}

// Sixteen requests of ten blocks, of which they have eight in common: 8 + 16 · 2 blocks hold all of them.
TEST(PrefixSharing, WhatIsSharedIsNeededOnce) {
  std::vector<Request> requests;
  for (std::uint32_t id = 1; id <= 16; ++id) {
    requests.push_back(prompt_of(id, 128, 10, 20));
  }
  Played played(requests, {.act_blocks = 0, .kv_blocks = 42}, kSharing);
  played.finish();
  EXPECT_GE(played.most_running, 12);
  EXPECT_EQ(played.scheduler.preemptions(), 0);
}

TEST(PrefixSharing, OfALostDeviceTheOldestStoresSharedBlocksAgain) {
  const auto policy = make_policy("kv-only", {});
  Scheduler scheduler(*policy, {.act_blocks = 0, .kv_blocks = 50, .gpu_kv_blocks = 50}, kSharing);
  const std::vector<Request> requests{prompt_of(1, 96, 4, 9), prompt_of(2, 96, 4, 9),
                                      prompt_of(3, 96, 4, 9)};
  for (const Request& request : requests) {
    scheduler.add(request);
  }
  const auto step = [&] {
    std::vector<Outcome> outcomes;
    for (const ScheduledChunk& chunk : scheduler.next()) {
      if (chunk.complete()) {
        outcomes.push_back({.request = chunk.request->request->id, .token = 5});
      }
    }
    scheduler.complete(outcomes);
  };
  step();
  step();
  ASSERT_GT(scheduler.blocks().shared(), 0);
  scheduler.next();
  scheduler.abandon(true);
  EXPECT_EQ(scheduler.blocks().shared(), 0);
  std::map<std::pair<BlockKind, std::uint32_t>, std::uint32_t> writers;
  const auto chunks = scheduler.next();
  EXPECT_EQ(chunks.front().request->request->id, RequestId{1});
  for (const ScheduledChunk& chunk : chunks) {
    for (std::int32_t at = chunk.context / kBlockTokens; at < chunk.blocks(); ++at) {
      const BlockRef& block = chunk.request->context.blocks()[static_cast<std::size_t>(at)];
      if (block.place == Place::gpu) {
        EXPECT_TRUE(writers.emplace(std::pair(block.kind, block.number.n), 1).second)
            << "two requests store block " << block.number.n;
      }
    }
  }
}

// In one mini-batch a shared block crosses the link once, and all sequences name its slot.
TEST(PrefixSharing, AMiniBatchLoadsASharedBlockOnce) {
  const auto policy = make_policy("kv-only", {});
  Scheduler scheduler(*policy, kPool, kSharing);
  const std::vector<Request> requests{prompt_of(1, 64, 4, 9), prompt_of(2, 64, 4, 9),
                                      prompt_of(3, 64, 4, 9)};
  for (const Request& request : requests) {
    scheduler.add(request);
  }
  const auto generate = [&](std::span<const ScheduledChunk> chunks) {
    std::vector<Outcome> outcomes;
    for (const ScheduledChunk& chunk : chunks) {
      outcomes.push_back({.request = chunk.request->request->id, .token = 5});
    }
    return outcomes;
  };
  OrderTables tables(kPool);
  const PackLimits limits{
      .act_slots = 50, .kv_slots = 50, .tokens = 800, .rows = 400, .sequences = 16};
  const PackingRule rule{.policy = *policy, .host = kPool, .limits = limits};
  scheduler.complete(generate(scheduler.next()));
  const auto second = scheduler.next();
  const auto iteration = plan_iteration(rule, second, tables, {});
  ASSERT_EQ(iteration.mini_batches.size(), 1u);
  const messages::MiniBatchT& batch = *iteration.mini_batches[0];
  ASSERT_EQ(batch.sequences.size(), 3u);
  std::uint32_t loaded = 0;
  for (const messages::BlockRun& run : batch.loads) {
    loaded += run.count();
  }
  EXPECT_EQ(loaded, 4u + 1u) << "four shared ones, and the first request's last";
  ASSERT_EQ(batch.taken_over.size(), 2u);
  for (const auto& taken : batch.taken_over) {
    EXPECT_EQ(taken->position, 0u);
    EXPECT_EQ(taken->tokens.size(), 64u);
    EXPECT_EQ(taken->tokens[63], 64);
  }
  scheduler.complete(generate(second));
  const auto third = scheduler.next();
  const auto next = plan_iteration(rule, third, tables, {.number = 2});
  EXPECT_TRUE(next.mini_batches.at(0)->taken_over.empty()) << "they are told once";
}

// Scored behind 15 tokens, of 22 that are fed: the first 14 rows are another's, and the last 8 are stored up to the
// end of that block nowhere.
TEST(PrefixSharing, AnswersThatAreOnlyScoredTakeOverAPartOfABlock) {
  const auto policy = make_policy("kv-only", {});
  Scheduler scheduler(*policy, kPool, kSharing);
  std::vector<Request> requests;
  for (std::uint32_t id = 1; id <= 4; ++id) {
    requests.push_back(scored(id));
  }
  for (const Request& request : requests) {
    scheduler.add(request);
  }
  const auto first = scheduler.next();
  ASSERT_EQ(first.size(), 1u);
  scheduler.complete(any_outcomes(first));
  const auto second = scheduler.next();
  ASSERT_EQ(second.size(), 3u);
  OrderTables tables(kPool);
  const PackLimits limits{
      .act_slots = 50, .kv_slots = 50, .tokens = 800, .rows = 400, .sequences = 16};
  const auto iteration =
      plan_iteration({.policy = *policy, .host = kPool, .limits = limits}, second, tables, {});
  const messages::MiniBatchT& batch = *iteration.mini_batches.at(0);
  EXPECT_EQ(batch.tokens.size(), 24u);
  ASSERT_EQ(batch.loads.size(), 3u) << "each has a slot of its own";
  for (const messages::BlockRun& run : batch.loads) {
    EXPECT_EQ(run.tail_tokens(), 14);
    EXPECT_EQ(run.first_block(), batch.loads[0].first_block());
  }
  ASSERT_EQ(batch.stores.size(), 3u);
  for (const messages::Store& store : batch.stores) {
    EXPECT_EQ(store.count(), 6u);
    EXPECT_NE(store.block(), batch.loads[0].first_block());
  }
  scheduler.complete(any_outcomes(second));
  EXPECT_TRUE(scheduler.idle());
  EXPECT_EQ(scheduler.blocks().free(), 100);
}

// Parts of ACT blocks, and of blocks on the device, are taken over by nobody, so nobody waits for one.
TEST(PrefixSharing, AnswersBehindABlockWithoutPartsAllRunAtOnce) {
  const auto policy = make_policy("act-only", {});
  const Allocation act{.act_blocks = 100, .kv_blocks = 0};
  const Allocation on_device{
      .act_blocks = 0, .kv_blocks = 50, .gpu_act_blocks = 0, .gpu_kv_blocks = 50};
  for (const bool of_device : {false, true}) {
    const auto kv_only = make_policy("kv-only", {});
    Scheduler scheduler(of_device ? *kv_only : *policy, of_device ? on_device : act, kSharing);
    std::vector<Request> requests;
    for (std::uint32_t id = 1; id <= 4; ++id) {
      requests.push_back(scored(id));
    }
    for (const Request& request : requests) {
      scheduler.add(request);
    }
    int iterations = 0;
    while (!scheduler.idle()) {
      scheduler.complete(any_outcomes(scheduler.next()));
      ++iterations;
    }
    EXPECT_LE(iterations, 2) << of_device;
  }
}

TEST(PrefixSharing, AnOrderNamesNoMoreTokensThanItHasRoomFor) {
  ScheduleLimits few = kSharing;
  few.taken_over = 100;
  std::vector<Request> requests;
  for (std::uint32_t id = 1; id <= 5; ++id) {
    requests.push_back(prompt_of(id, 48, 5));
  }
  Played played(requests, kPool, few);
  EXPECT_EQ(played.step().size(), 1u);
  EXPECT_EQ(played.step().size(), 2u) << "48 ids each";
  EXPECT_EQ(played.step().size(), 2u);
  played.finish();
  EXPECT_EQ(played.all_rows, 53 + 4 * 5);
}

// A part of a block is of no use to a request whose rows behind it do not all run in one iteration.
TEST(PrefixSharing, APartOfABlockIsTakenOverOnlyByRequestsThatEndAtOnce) {
  ScheduleLimits limits = kSharing;
  limits.sequence_rows = 20;
  std::vector<Request> requests{prompt_of(1, 15, 7, 0), prompt_of(2, 15, 40, 0),
                                prompt_of(3, 15, 7, 5)};
  for (Request& request : requests) {
    request.sampling.prompt_top = 1;
    request.sampling.score_from = request.sampling.max_tokens == 0 ? 15 : 0;
    request.scored_last = 1;
  }
  Played played(std::move(requests), kPool, limits);
  played.finish();
  EXPECT_EQ(played.scheduler.shared_tokens(), 0);
}

TEST(PrefixSharing, AnIterationThatCameToNothingRunsPartsAgain) {
  const auto policy = make_policy("kv-only", {});
  Scheduler scheduler(*policy, kPool, kSharing);
  std::vector<Request> requests{prompt_of(1, 15, 7, 0), prompt_of(2, 15, 7, 0)};
  for (Request& request : requests) {
    request.sampling.prompt_top = 1;
    request.sampling.score_from = 15;
    request.scored_last = 1;
    scheduler.add(request);
  }
  scheduler.complete(any_outcomes(scheduler.next()));
  EXPECT_EQ(scheduler.snapshots().at(0).stored, 0) << "a part is nothing to hand over";
  ASSERT_EQ(scheduler.next().front().new_tokens, 8);
  scheduler.abandon(false);
  EXPECT_EQ(scheduler.blocks().free(), 100);
  EXPECT_EQ(scheduler.next().front().new_tokens, 8) << "the part is still there";
}

PrefixIndex::Tokens block_of(const std::vector<TokenId>& tokens) {
  return std::span(tokens).first(static_cast<std::size_t>(kBlockTokens));
}

TEST(PrefixIndex, ABlockIsFoundBehindItsOwnBeginningAlone) {
  PrefixIndex index;
  const std::vector<TokenId> a(16, 1), b(16, 2);
  const BlockRef first{BlockKind::kv, Place::host, {3}}, second{BlockKind::act, Place::gpu, {3}};
  const auto node = index.add(0, block_of(a), first);
  const auto behind = index.add(node, block_of(b), second);
  ASSERT_TRUE(index.find(0, block_of(a)));
  EXPECT_EQ(index.find(0, block_of(a))->block, first);
  EXPECT_EQ(index.find(node, block_of(b))->block, second);
  EXPECT_EQ(index.find(node, block_of(b))->node, behind);
  EXPECT_FALSE(index.find(0, block_of(b)));
  EXPECT_FALSE(index.find(behind, block_of(b)));
}

TEST(PrefixIndex, TheFirstBlockOfABeginningStays) {
  PrefixIndex index;
  const std::vector<TokenId> a(16, 1);
  const BlockRef first{BlockKind::kv, Place::host, {3}}, copy{BlockKind::kv, Place::host, {4}};
  const auto node = index.add(0, block_of(a), first);
  EXPECT_EQ(index.add(0, block_of(a), copy), node);
  EXPECT_EQ(index.find(0, block_of(a))->block, first);
  index.forget(copy);
  EXPECT_TRUE(index.find(0, block_of(a)));
  index.forget(first);
  EXPECT_FALSE(index.find(0, block_of(a)));
}

TEST(PrefixIndex, ABlockIsFoundByAPartOfItThatWasAdded) {
  PrefixIndex index;
  const std::vector<TokenId> a(16, 1);
  const BlockRef block{BlockKind::kv, Place::host, {3}};
  index.add(0, block_of(a), block);
  EXPECT_FALSE(index.find(0, block_of(a).first(5)));
  index.add(0, block_of(a).first(5), block);
  EXPECT_TRUE(index.find(0, block_of(a).first(5)));
  EXPECT_FALSE(index.find(0, block_of(a).first(4)));
  EXPECT_TRUE(index.find(0, block_of(a)));
  index.forget(block);
  EXPECT_EQ(index.size(), 0u);
}

TEST(PrefixIndex, BlocksFromANumberOnAreForgotten) {
  PrefixIndex index;
  const std::vector<TokenId> a(16, 1), b(16, 2), c(16, 3);
  index.add(0, block_of(a), {BlockKind::kv, Place::host, {3}});
  index.add(0, block_of(b), {BlockKind::kv, Place::host, {4}});
  index.add(0, block_of(c), {BlockKind::act, Place::host, {9}});
  index.forget_from(BlockKind::kv, Place::host, 4);
  EXPECT_TRUE(index.find(0, block_of(a)));
  EXPECT_FALSE(index.find(0, block_of(b)));
  EXPECT_TRUE(index.find(0, block_of(c)));
}

}  // namespace
}  // namespace poise
