#include "planner/schedule/block_pool.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

#include "common/trouble.h"

namespace poise {
namespace {

TEST(BlockPool, HandsOutTheLowestFreeNumber) {
  BlockPool pool(3);
  EXPECT_EQ(pool.take(), BlockId{0});
  EXPECT_EQ(pool.take(), BlockId{1});
  EXPECT_EQ(pool.take(), BlockId{2});
  EXPECT_EQ(pool.take(), std::nullopt);
}

TEST(BlockPool, ABlockGivenBackIsTheNextOneTaken) {
  BlockPool pool(200);
  for (int i = 0; i < 200; ++i) {
    pool.take();
  }
  pool.give_back({130});
  EXPECT_EQ(pool.take(), BlockId{130});
}

TEST(BlockPool, ABlockIsGivenBackOnce) {
  BlockPool pool(8);
  const BlockId block = *pool.take();
  pool.give_back(block);
  EXPECT_THROW(pool.give_back(block), Defect);
  EXPECT_THROW(pool.give_back({8}), Defect);
}

TEST(BlockPool, TheLimitDoesNotMoveBelowATakenBlock) {
  BlockPool pool(100);
  for (int i = 0; i < 70; ++i) {
    pool.take();
  }
  EXPECT_FALSE(pool.set_limit(69));
  EXPECT_EQ(pool.limit(), 100u);
  EXPECT_TRUE(pool.set_limit(70));
  EXPECT_EQ(pool.take(), std::nullopt);
  EXPECT_TRUE(pool.set_limit(129));
  EXPECT_EQ(pool.free(), 59u);
  EXPECT_EQ(pool.take(), BlockId{70});
}

TEST(BlockPool, AnEmptyPoolHasNothing) {
  BlockPool pool(0);
  EXPECT_EQ(pool.take(), std::nullopt);
  EXPECT_TRUE(pool.set_limit(1));
  EXPECT_EQ(pool.take(), BlockId{0});
}

TEST(BlockPool, BehavesAsASetOfFreeNumbersDoes) {
  for (std::uint32_t seed = 1; seed <= 50; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    std::uint32_t limit = random() % 300;
    BlockPool pool(limit);
    std::set<std::uint32_t> free, taken;
    for (std::uint32_t i = 0; i < limit; ++i) {
      free.insert(i);
    }
    for (int step = 0; step < 2000; ++step) {
      const std::uint32_t dice = random() % 100;
      if (dice < 10) {
        const std::uint32_t wanted = random() % 310;
        const bool possible = free.contains(wanted);
        ASSERT_EQ(pool.take({wanted}), possible);
        if (possible) {
          taken.insert(wanted);
          free.erase(wanted);
        }
      } else if (dice < 50) {
        const auto block = pool.take();
        ASSERT_EQ(block.has_value(), !free.empty());
        if (block) {
          ASSERT_EQ(block->n, *free.begin());
          taken.insert(block->n);
          free.erase(free.begin());
        }
      } else if (dice < 95 && !taken.empty()) {
        const auto chosen = std::next(taken.begin(), random() % taken.size());
        pool.give_back({*chosen});
        free.insert(*chosen);
        taken.erase(chosen);
      } else {
        const std::uint32_t wanted = random() % 300;
        const bool possible = taken.empty() || *taken.rbegin() < wanted;
        ASSERT_EQ(pool.set_limit(wanted), possible);
        if (possible) {
          free.erase(free.lower_bound(wanted), free.end());
          for (std::uint32_t i = limit; i < wanted; ++i) {
            free.insert(i);
          }
          limit = wanted;
        }
      }
      ASSERT_EQ(pool.free(), free.size());
      ASSERT_EQ(pool.taken(), taken.size());
      ASSERT_EQ(pool.limit(), limit);
      ASSERT_EQ(pool.least_limit(), taken.empty() ? 0 : *taken.rbegin() + 1);
    }
  }
}

}  // namespace
}  // namespace poise
