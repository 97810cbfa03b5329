#include <gtest/gtest.h>

#include "common/trouble.h"
#include "planner/policies/allocation.h"
#include "planner/policies/policy.h"
#include "planner/schedule/block_table.h"
#include "tests/planner/policies/policy_inputs.h"

namespace poise {
namespace {

Bytes bytes_of(const Allocation& split, const AllocationInputs& from) {
  const Bytes one_layer = from.sizes.block(BlockKind::act) * split.act_blocks +
                          from.sizes.block(BlockKind::kv) * split.kv_blocks;
  return Bytes{round_up(one_layer.n, kRegionAlignment)} * from.layers;
}

TEST(Ratio, ThePapersExampleGoesOnWithAnActBlock) {
  EXPECT_EQ(keep_ratio({.act_blocks = 300, .kv_blocks = 100}, {.act_blocks = 5, .kv_blocks = 2}),
            BlockKind::act);
}

TEST(Ratio, KeepsToTheHostsAsARequestGrows) {
  const struct {
    std::uint32_t act, kv;
    std::string kinds;  // of the first blocks
  } cases[] = {
      {1, 1, "AKAKAKAK"},  {3, 1, "AAKAAAKA"}, {1, 3, "KAKKKAKK"},
      {2, 1, "AKAAKAAKA"}, {100, 0, "AAAA"},   {0, 100, "KKKK"},
  };
  for (const auto& c : cases) {
    RequestSplit request;
    std::string kinds;
    while (kinds.size() < c.kinds.size()) {
      const bool act =
          keep_ratio({.act_blocks = c.act, .kv_blocks = c.kv}, request) == BlockKind::act;
      kinds += act ? 'A' : 'K';
      ++(act ? request.act_blocks : request.kv_blocks);
    }
    EXPECT_EQ(kinds, c.kinds) << c.act << ":" << c.kv;
  }
}

TEST(Ratio, CountsActBlocksOnTheDeviceToo) {
  RequestSplit request{.act_blocks = 4, .kv_blocks = 2};
  EXPECT_EQ(keep_ratio({.act_blocks = 50, .kv_blocks = 100}, request), BlockKind::kv);
  EXPECT_EQ(keep_ratio({.act_blocks = 50, .kv_blocks = 100, .gpu_act_blocks = 250}, request),
            BlockKind::act);
}

TEST(Ratio, IsNeverOffByMoreThanABlock) {
  for (std::uint32_t act = 0; act <= 20; ++act) {
    RequestSplit request;
    for (int n = 1; n <= 400; ++n) {
      const BlockKind kind = keep_ratio({.act_blocks = act, .kv_blocks = 20 - act}, request);
      ++(kind == BlockKind::act ? request.act_blocks : request.kv_blocks);
      EXPECT_NEAR(request.act_blocks, n * act / 20.0, 0.5 + 1e-9) << act << " of 20, " << n;
    }
  }
}

TEST(HostSplit, TakesTheShareOfBlocksAndStaysWithinTheBytes) {
  for (const BlockSizes& sizes : {kMultiHead, kGroupedQueries}) {
    for (int twentieths = 0; twentieths <= 20; ++twentieths) {
      const double share = twentieths / 20.0;
      const AllocationInputs from = inputs(sizes, kMiB * 100, 1 << 20);
      const Allocation split = split_host(from, share);
      const double blocks = split.act_blocks + split.kv_blocks;
      EXPECT_LE(bytes_of(split, from), from.host);
      EXPECT_NEAR(split.act_blocks / blocks, share, 1 / blocks);
      // No room is left for two more blocks.
      const Bytes larger = std::max(sizes.block(BlockKind::act), sizes.block(BlockKind::kv));
      EXPECT_GT(bytes_of(split, from) + larger * 2 * from.layers, from.host) << share;
    }
  }
}

TEST(HostSplit, TakesNoMoreThanTheRequestsCanFill) {
  const Allocation split = split_host(inputs(kMultiHead, kGiB * 1000, 41), 0.5);
  EXPECT_EQ(split.act_blocks + split.kv_blocks, 41u);
}

TEST(HostSplit, OfTooLittleIsNothing) {
  EXPECT_EQ(split_host(inputs(kMultiHead, Bytes{4096}, 41), 0.5), Allocation{});
  EXPECT_EQ(split_host(inputs(kMultiHead, Bytes{-1}, 41), 0.5), Allocation{});
}

TEST(Policies, TheTwoEndsAreTheHybridsWithShareNoneAndAll) {
  const AllocationInputs from = inputs(kMultiHead, kMiB * 64, 1000);
  const struct {
    const char* name;
    double share;
  } cases[] = {{"kv-only", 0}, {"act-only", 1}};
  for (const auto& c : cases) {
    const auto end = make_policy(c.name, {});
    const auto hybrid = make_policy("hybrid", {.act_share = c.share});
    const Allocation split = end->allocate(from);
    EXPECT_EQ(split, hybrid->allocate(from));
    for (std::int32_t n = 0; n < 50; ++n) {
      const RequestSplit request{
          .act_blocks = c.share == 1 ? n : 0, .kv_blocks = c.share == 0 ? n : 0, .most_blocks = 50};
      EXPECT_EQ(end->next_block(split, request), hybrid->next_block(split, request));
    }
  }
}

TEST(ActOnly, KeepsKvBlocksOnTheDeviceWhereItIsTheSlowerSide) {
  const AllocationInputs from = half_on_device();
  const Allocation plain = make_policy("act-only", {})->allocate(from);
  EXPECT_EQ(plain.act_blocks, 400u);
  Profile profile;
  profile.load_act = {.b = 10e-6};
  profile.load_kv = {.b = 20e-6};
  profile.forward = {.b = 1e-9};
  profile.kv_gen = {.b = 2e-6};  // 400 take less than loading 200
  const auto balanced = [&] {
    const auto policy = make_policy("act-only", {.profile = std::make_shared<Profile>(profile)});
    return policy->allocate(from);
  };
  EXPECT_EQ(balanced(), plain);
  // 400 - kv are made again, 200 + kv cross where a KV block takes the place of two ACT blocks: as long
  // at 57.
  profile.kv_gen = {.b = 7.5e-6};
  const Allocation blocks = balanced();
  EXPECT_EQ(blocks.kv_blocks, 0u);
  EXPECT_NEAR(blocks.gpu_kv_blocks, 57, 1);
  EXPECT_EQ(blocks.all_act_blocks() + blocks.all_kv_blocks(), 400);
  const auto policy = make_policy("act-only", {.profile = std::make_shared<Profile>(profile)});
  EXPECT_EQ(policy->next_block(blocks, {.act_blocks = 6, .kv_blocks = 0}), BlockKind::kv);
}

TEST(HybridStatic, SplitsBytesOneToOneAndGivesActBlocksFirst) {
  const auto policy = make_policy("hybrid-static", {});
  for (const BlockSizes& sizes : {kMultiHead, kGroupedQueries}) {
    const Allocation split = policy->allocate(inputs(sizes, kMiB * 100, 1 << 20));
    const auto bytes = [&](BlockKind kind, std::uint32_t blocks) {
      return static_cast<double>((sizes.block(kind) * blocks).n);
    };
    EXPECT_NEAR(bytes(BlockKind::act, split.act_blocks), bytes(BlockKind::kv, split.kv_blocks),
                0.02 * bytes(BlockKind::kv, split.kv_blocks));
  }
  EXPECT_EQ(kinds(*policy, {.act_blocks = 20, .kv_blocks = 10}, 9), "AAAAAAKKK");
  EXPECT_EQ(kinds(*policy, {.act_blocks = 5, .kv_blocks = 10, .gpu_act_blocks = 15}, 6), "AAAAKK");
}

TEST(RowByRow, HasNoMoreBlocksThanAMiniBatchHolds) {
  AllocationInputs from = inputs(kMultiHead, kMiB * 512, 4000);
  from.mini_batch = 512;
  const auto policy = make_policy("row-by-row", {});
  EXPECT_EQ(policy->allocate(from), (Allocation{.kv_blocks = 512, .placed = true}));
  from.largest_request = 700;
  EXPECT_EQ(policy->allocate(from), (Allocation{.kv_blocks = 700, .placed = true}));
}

TEST(TokenRecompute, KeepsTheFirstBlocksOfEachRequestAsTokensAlone) {
  AllocationInputs from = inputs(kMultiHead, kMiB * 512, 400);
  from.largest_request = 40;
  from.sequences = 10;
  const auto quarter = make_policy("token-recompute", {});
  EXPECT_EQ(quarter->token_blocks(40), 10);
  const Allocation blocks = quarter->allocate(from);
  EXPECT_EQ(blocks.token_blocks, 10);
  EXPECT_EQ(blocks.act_blocks, 0u);
  EXPECT_GE(blocks.kv_blocks, 300u);
  EXPECT_LE(blocks.kv_blocks, 305u);
  const auto all = make_policy("token-recompute", {.recompute_share = 1});
  EXPECT_EQ(all->token_blocks(40), 39) << "a pool has a block";
  std::int32_t before = 0;
  for (std::int32_t blocks_of_request = 0; blocks_of_request < 100; ++blocks_of_request) {
    EXPECT_GE(quarter->token_blocks(blocks_of_request), before);
    before = quarter->token_blocks(blocks_of_request);
  }
  EXPECT_FALSE(make_policy("token-recompute", {.recompute_share = 0})->runs_tokens_again());
  for (const PolicyEntry& entry : policies()) {
    const auto policy = make_policy(entry.name, {});
    EXPECT_EQ(policy->runs_tokens_again(), policy->token_blocks(1 << 20) > 0) << entry.name;
  }
}

TEST(Optimal, WithoutAProfileSaysWhereToGetOne) {
  try {
    make_policy("optimal", {})->allocate(inputs(kMultiHead, kMiB, 10));
    FAIL() << "it decided by nothing";
  } catch (const Failure& failure) {
    EXPECT_NE(std::string(failure.what()).find("--machine"), std::string::npos) << failure.what();
    EXPECT_NE(std::string(failure.what()).find("--profile"), std::string::npos) << failure.what();
  }
}

TEST(Policies, AreKnownByNameWithALineAndASource) {
  for (const PolicyEntry& entry : policies()) {
    EXPECT_NE(make_policy(entry.name, {}), nullptr);
    EXPECT_FALSE(entry.description.empty());
    EXPECT_FALSE(entry.source.empty());
  }
}

TEST(Policies, RefuseWhatTheyDoNotKnow) {
  EXPECT_THROW(make_policy("fastest", {}), Failure);
  EXPECT_THROW(make_policy("kv-only", {.act_share = 0.5}), Failure);
  EXPECT_THROW(make_policy("act-only", {.act_share = 1}), Failure);
  EXPECT_THROW(make_policy("optimal", {.act_share = 0.5}), Failure);
  EXPECT_THROW(make_policy("kv-only", {.recompute_share = 0.5}), Failure);
  EXPECT_THROW(make_policy("token-recompute", {.recompute_share = 1.5}), Failure);
  EXPECT_THROW(make_policy("hybrid", {.row_by_row = true}), Failure);
  for (const double share : {-0.1, 1.1, std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_THROW(make_policy("hybrid", {.act_share = share}), Failure);
  }
}

TEST(BlockPools, GiveTheOtherKindWhereOneIsExhausted) {
  BlockPools blocks(1, 2);
  EXPECT_EQ(blocks.take(BlockKind::act)->kind, BlockKind::act);
  EXPECT_EQ(blocks.take(BlockKind::act)->kind, BlockKind::kv);
  EXPECT_EQ(blocks.take(BlockKind::kv)->kind, BlockKind::kv);
  EXPECT_EQ(blocks.take(BlockKind::kv), std::nullopt);
}

TEST(ContextBlocks, GiveEverythingBack) {
  BlockPools host(4, 4);
  ContextBlocks context;
  for (int i = 0; i < 6; ++i) {
    context.append(*host.take(i % 2 == 0 ? BlockKind::act : BlockKind::kv));
  }
  context.mark_stored(90);
  EXPECT_EQ(context.room(), 96);
  EXPECT_THROW(context.mark_stored(7), Defect);
  EXPECT_EQ(context.count(BlockKind::act), 3);
  context.give_back_all(host);
  EXPECT_EQ(host.free(), 8);
  EXPECT_EQ(context.stored(), 0);
  EXPECT_EQ(context.size(), 0);
}

}  // namespace
}  // namespace poise
