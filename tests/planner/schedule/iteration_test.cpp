#include "planner/schedule/iteration.h"

#include <gtest/gtest.h>

#include <map>
#include <vector>

namespace poise {
namespace {

TEST(PlannedIteration, HoldsEveryChunkOnceUnderItsName) {
  const Allocation host{.act_blocks = 20, .kv_blocks = 20};
  const auto policy = make_policy("hybrid", {.act_share = 0.5});
  Scheduler scheduler(*policy, host, {.max_num_seqs = 5, .prefill_rows = 60, .sequence_rows = 64});
  std::vector<Request> requests(5);
  for (std::size_t i = 0; i < requests.size(); ++i) {
    requests[i].id = {static_cast<std::uint32_t>(i + 1)};
    requests[i].prompt = std::vector<TokenId>(10 + i, 3);
    requests[i].sampling.max_tokens = 4;
    scheduler.add(requests[i]);
  }
  OrderTables room(host);
  const PackLimits limits{.act_slots = 4, .kv_slots = 4, .tokens = 64, .rows = 64, .sequences = 2};
  const auto chunks = scheduler.next();
  const messages::IterationT tables =
      plan_iteration({.policy = *policy, .host = host, .limits = limits}, chunks, room,
                     {.number = 7, .pool_epoch = 3});
  EXPECT_EQ(tables.iteration, 7u);
  EXPECT_EQ(tables.pool_epoch, 3u);
  EXPECT_GE(tables.mini_batches.size(), 3u) << "two sequences at most are in one";
  std::map<std::uint32_t, std::int32_t> rows;
  for (const auto& batch : tables.mini_batches) {
    for (const messages::Sequence& sequence : batch->sequences) {
      EXPECT_TRUE(rows.emplace(sequence.request(), static_cast<std::int32_t>(sequence.new_tokens()))
                      .second);
    }
  }
  ASSERT_EQ(rows.size(), chunks.size());
  for (const ScheduledChunk& chunk : chunks) {
    EXPECT_EQ(rows[chunk.request->request->id.n], chunk.new_tokens);
  }
}

// Half of each context's blocks are ACT. Where layers have a window, every line of loads and of
// regeneration is either seen there or not, and what is not seen is what lies before the windows.
TEST(PlannedIteration, KeepsApartWhatLayersWithAWindowLeaveOut) {
  constexpr std::int32_t kWindow = 40;
  const Allocation host{.act_blocks = 60, .kv_blocks = 60, .gpu_act_blocks = 9, .gpu_kv_blocks = 9};
  const auto policy = make_policy("hybrid", {.act_share = 0.5});
  Scheduler scheduler(*policy, host, {.max_num_seqs = 4, .prefill_rows = 600, .sequence_rows = 50});
  std::vector<Request> requests(4);
  for (std::size_t i = 0; i < requests.size(); ++i) {
    requests[i].id = {static_cast<std::uint32_t>(i + 1)};
    requests[i].prompt = std::vector<TokenId>(30 + 50 * i, 3);
    requests[i].sampling.max_tokens = 30;
    scheduler.add(requests[i]);
  }
  OrderTables without(host), with(host, {0, kWindow});
  const PackLimits limits{
      .act_slots = 40, .kv_slots = 40, .tokens = 1000, .rows = 200, .sequences = 3};
  const PackingRule rule{.policy = *policy, .host = host, .limits = limits};
  std::int64_t left_out = 0;
  while (!scheduler.idle()) {
    const auto chunks = scheduler.next();
    const auto tables = plan_iteration(rule, chunks, with, {});
    const auto plain = plan_iteration(rule, chunks, without, {});
    ASSERT_EQ(tables.mini_batches.size(), plain.mini_batches.size());
    std::int64_t unseen = 0, expected = 0;
    for (std::size_t i = 0; i < tables.mini_batches.size(); ++i) {
      const messages::MiniBatchT& batch = *tables.mini_batches[i];
      EXPECT_LE(batch.regenerate.size(), 2u);
      EXPECT_LE(plain.mini_batches[i]->regenerate.size(), 1u);
      const SeenLines seen = seen_lines(BlockTables(batch), kWindow);
      for (std::size_t line = 0; line < batch.loads.size(); ++line) {
        unseen += seen.loads[line] ? 0 : batch.loads[line].count();
      }
      for (const messages::Sequence& sequence : batch.sequences) {
        expected += unseen_blocks(sequence.context(), kWindow);
      }
    }
    EXPECT_EQ(unseen, expected);
    left_out += unseen;
    scheduler.complete(any_outcomes(chunks));
  }
  EXPECT_GT(left_out, 100);
}

}  // namespace
}  // namespace poise
