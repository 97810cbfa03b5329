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
    requests[i].prompt.assign(10 + i, 3);
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

}  // namespace
}  // namespace poise
