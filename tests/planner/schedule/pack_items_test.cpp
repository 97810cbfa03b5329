// What a request brings into a mini-batch, read off its blocks.

#include <gtest/gtest.h>

#include "planner/schedule/orders.h"
#include "planner/schedule/schedule.h"

namespace poise {
namespace {

TEST(PackItems, TellWhatTheDeviceHasFromWhatCrossesTheLink) {
  Request request{.id = {1}};
  request.prompt = std::vector<TokenId>(7 * kBlockTokens, 0);
  request.sampling.max_tokens = kBlockTokens;
  const auto policy = make_policy("hybrid", {});
  RunningRequest running(request, *policy);
  BlockPools pools(4, 4, 4, 4);
  for (const auto& [kind, place] : {std::pair{BlockKind::kv, Place::gpu},
                                    {BlockKind::act, Place::gpu},
                                    {BlockKind::kv, Place::gpu},
                                    {BlockKind::kv, Place::host},
                                    {BlockKind::act, Place::host},
                                    {BlockKind::kv, Place::host},
                                    {BlockKind::kv, Place::gpu}}) {
    running.context.append(*pools.take(kind, place));
  }
  const auto item_of = [&](std::int32_t context) {
    const ScheduledChunk chunk{.request = &running, .context = context, .new_tokens = 1};
    return pack_items(std::span(&chunk, 1)).front();
  };
  const PackItem stored = item_of(7 * kBlockTokens - 1);
  EXPECT_EQ(stored.act_loads, 2);
  EXPECT_EQ(stored.kv_loads, 2);
  EXPECT_EQ(stored.kv_slots, 2);
  EXPECT_EQ(stored.kv_here, 3);
  const PackItem beginning = item_of(6 * kBlockTokens);
  EXPECT_EQ(beginning.kv_loads, 2);
  EXPECT_EQ(beginning.kv_here, 3) << "the last block is new";
  EXPECT_EQ(beginning.kv_slots, 2);
}

}  // namespace
}  // namespace poise
