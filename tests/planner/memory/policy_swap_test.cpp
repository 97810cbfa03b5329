#include "planner/memory/policy_swap.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <random>
#include <set>

#include "common/trouble.h"
#include "tests/support/model_files.h"

namespace poise {
namespace {

TEST(PolicyWish, IsReadStrictly) {
  const PolicyWish wish = parse_policy_wish(
      R"({"serial": 1795317000000000001, "policy": "hybrid", "act_share": 0.25, "machine": "m"})",
      "w");
  EXPECT_EQ(wish.serial, 1795317000000000001u);
  EXPECT_EQ(wish.policy, "hybrid");
  EXPECT_EQ(wish.act_share, 0.25);
  EXPECT_EQ(wish.machine, "m");
  for (const char* text :
       {"", "{", "[]", "{}", R"({"policy": 1})", R"({"policy": "x", "serial": -1})",
        R"({"policy": "x", "act_share": "much"})"}) {
    EXPECT_THROW(parse_policy_wish(text, "w"), Failure) << text;
  }
}

TEST(PolicyWishes, AreSeenOnceEach) {
  const testing_support::TempDirectory folder;
  PolicyWishes wishes(folder.path());
  EXPECT_FALSE(wishes.changed());
  EXPECT_FALSE(wishes.in_force());
  for (const char* name : {"kv-only", "act-only", "kvpr"}) {
    testing_support::write_file(folder.path() / "new",
                                fmt::format(R"({{"serial": 1, "policy": "{}"}})", name));
    std::filesystem::rename(folder.path() / "new", folder.path() / "policy.json");
    EXPECT_TRUE(wishes.changed());
    EXPECT_EQ(wishes.read().policy, name);
    EXPECT_FALSE(wishes.changed());
  }
  wishes.put_in_force({.serial = 5, .policy = "hybrid", .act_share = 0.5, .machine = "m"});
  ASSERT_TRUE(wishes.in_force());
  EXPECT_EQ(wishes.in_force()->policy, "hybrid");
  EXPECT_EQ(wishes.in_force()->act_share, 0.5);
  EXPECT_EQ(wishes.in_force()->machine, "m");
}

TEST(PolicyWishes, ThatCannotBeRecordedAreNotTakenForRecorded) {
  const testing_support::TempDirectory folder;
  std::filesystem::create_directories(folder.path() / "policy.in_force.json" / "in the way");
  try {
    PolicyWishes(folder.path()).put_in_force({.serial = 5, .policy = "hybrid"});
    ADD_FAILURE() << "it was recorded";
  } catch (const Failure& failure) {
    EXPECT_NE(std::string(failure.what()).find("policy.in_force.json cannot be written"),
              std::string::npos)
        << failure.what();
  }
}

// Whatever is taken and given back, and wherever the border is wished: no taken block is lost, both
// kinds stay in the region, and once all is free the border is where it is wished.
TEST(Border, LosesNoTakenBlockAndArrives) {
  const auto seed = static_cast<unsigned>(::testing::UnitTest::GetInstance()->random_seed());
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 200; ++round) {
    const std::int64_t act_row = 16 << random() % 3, kv_row = 16 << random() % 3;
    const BlockSizes sizes{.kv_row = {kv_row}, .act_row = {act_row}};
    PoolPartition now{.region_bytes = 4096 * (1 + random() % 64), .act_blocks = 0, .kv_blocks = 0};
    const auto split = [&](double share) {
      const auto bytes = static_cast<double>(now.region_bytes);
      const auto act = static_cast<double>(sizes.block(BlockKind::act).n);
      const auto kv = static_cast<double>(sizes.block(BlockKind::kv).n);
      return Allocation{.act_blocks = static_cast<std::uint32_t>(bytes * share / act),
                        .kv_blocks = static_cast<std::uint32_t>(bytes * (1 - share) / kv)};
    };
    const auto shares = [&] { return static_cast<double>(random() % 5) / 4; };
    Allocation wished = split(shares());
    now.act_blocks = wished.act_blocks;
    now.kv_blocks = wished.kv_blocks;
    BlockPools pools(now.act_blocks, now.kv_blocks);
    const std::int64_t least = 4;
    std::set<std::pair<BlockKind, std::uint32_t>> taken;
    for (int step = 0; step < 300; ++step) {
      const bool ends = step > 200;
      if (!ends && random() % 20 == 0) {
        wished = split(shares());
      }
      if (!ends && random() % 2 == 0) {
        if (const auto block = pools.take(random() % 2 == 0 ? BlockKind::act : BlockKind::kv)) {
          EXPECT_TRUE(taken.emplace(block->kind, block->number.n).second);
        }
      } else if (!taken.empty()) {
        const auto one =
            std::next(taken.begin(), static_cast<std::ptrdiff_t>(random() % taken.size()));
        pools.give_back({one->first, Place::host, BlockId{one->second}});
        taken.erase(one);
      }
      const PoolPartition next = border_toward(now, wished, pools, sizes, least);
      ASSERT_TRUE(next.fits(sizes));
      ASSERT_EQ(next.region_bytes, now.region_bytes);
      ASSERT_GE(next.act_blocks + next.kv_blocks, least);
      for (const auto& [kind, number] : taken) {
        ASSERT_LT(number, next.blocks(kind)) << "a taken block is cut off";
      }
      pools.set_limits(next.act_blocks, next.kv_blocks);
      now = next;
    }
    while (!taken.empty()) {
      pools.give_back({taken.begin()->first, Place::host, BlockId{taken.begin()->second}});
      taken.erase(taken.begin());
    }
    now = border_toward(now, wished, pools, sizes, least);
    EXPECT_EQ(now.act_blocks, wished.act_blocks);
    EXPECT_EQ(now.kv_blocks, wished.kv_blocks);
  }
}

TEST(Border, StaysWhereTheLargestRequestWouldNotFit) {
  const BlockSizes sizes{.kv_row = {32}, .act_row = {16}};
  const PoolPartition now{.region_bytes = 4096, .act_blocks = 16, .kv_blocks = 0};
  BlockPools pools(16, 0);
  const Allocation wished{.act_blocks = 0, .kv_blocks = 8};
  EXPECT_EQ(border_toward(now, wished, pools, sizes, 8).kv_blocks, 8u);
  EXPECT_EQ(border_toward(now, wished, pools, sizes, 9).act_blocks, 16u);
}

}  // namespace
}  // namespace poise
