// KVPR's policy: the split point, and at which size it is taken.

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>

#include "planner/policies/split_point.h"
#include "tests/planner/policies/policy_inputs.h"

namespace poise {
namespace {

TEST(Kvpr, SplitPointIsThatOfTryingThemAll) {
  std::mt19937 random(3);
  const auto draw = [&](double most) {
    return std::uniform_real_distribution<double>(0, most)(random);
  };
  const auto line = [&] {
    return Line{.a = random() % 2 == 0 ? 0 : draw(20), .b = random() % 8 == 0 ? 0 : draw(5)};
  };
  // Times rise in steps where they were measured.
  const auto measured = [&] {
    Line steps = line();
    double time = steps.a;
    for (std::uint32_t n = 4; n <= 60; n += 4 + random() % 12) {
      time += random() % 2 == 0 ? 0 : draw(60);
      steps.points.push_back({.n = static_cast<double>(n), .time = {time}});
    }
    return steps;
  };
  for (int round = 0; round < 3000; ++round) {
    const bool lines = round % 2 == 0;
    const Line load_act = lines ? line() : measured(), kv_gen = lines ? line() : measured(),
               load_kv = lines ? line() : measured();
    const auto blocks = static_cast<std::int32_t>(random() % 60);
    const SplitCosts costs{load_act, kv_gen, load_kv, 1.0 + random() % 3};
    const auto time = [&](std::int32_t l) { return split_time(costs, l, blocks).n; };
    double least = time(0);
    for (std::int32_t l = 1; l <= blocks; ++l) {
      least = std::min(least, time(l));
    }
    ASSERT_NEAR(time(split_point(costs, blocks)), least, 1e-6) << round;
  }
}

// Where queries share keys, an ACT block may be as large as a KV block: then nothing is gained.
TEST(Kvpr, SplitPointIsTheSmallestOfThoseThatTakeAsLong) {
  for (double requests = 1; requests < 50; requests += 0.7) {
    const Line load{.b = 0.1}, kv_gen{.b = 0.01};
    EXPECT_EQ(split_point({load, kv_gen, load, requests}, 34), 0) << requests;
  }
}

// The kinds of a request's blocks where all that are under way have as many.
std::string kvpr_kinds(const PolicyOptions& options, std::int32_t blocks) {
  const auto policy = make_policy("kvpr", options);
  AllocationInputs from = inputs(kMultiHead, kGiB, std::int64_t{30} * blocks);
  from.largest_request = blocks;
  from.mini_batch = 10 * blocks;
  return kinds(*policy, policy->allocate(from), blocks);
}

TEST(Kvpr, GivesTheFirstBlocksAsActivations) {
  EXPECT_EQ(kvpr_kinds({}, 6), "AAAKKK");
  EXPECT_EQ(kvpr_kinds({.act_share = 1}, 4), "AAAA");
  auto profile = std::make_shared<Profile>();
  profile->load_act.b = 1;
  profile->load_kv.b = 2;
  profile->kv_gen.b = 1;  // Eq. 11: l + max(l, 2·(6 - l)) is least where l = 4
  EXPECT_EQ(kvpr_kinds({.profile = profile}, 6), "AAAAKK");
  profile->load_act.b = 2.5;  // as with grouped queries: activations are the larger ones
  EXPECT_EQ(kvpr_kinds({.profile = profile}, 4), "KKKK");
}

TEST(Kvpr, SplitTimeIsEq11OfAllRequestsInAMiniBatch) {
  const Line load_act{.a = 1, .b = 1}, kv_gen{.a = 3, .b = 1}, load_kv{.a = 2, .b = 2};
  EXPECT_DOUBLE_EQ(split_time({load_act, kv_gen, load_kv, 10}, 4, 6).n, 1 + 40 + (3 + 40));
  EXPECT_DOUBLE_EQ(split_time({load_act, kv_gen, load_kv, 10}, 2, 6).n, 1 + 20 + (2 + 80));
}

// A copy's and a product's constants are a mini-batch's. Charged to each request, they make nothing worth
// making again: l = 0.
TEST(Kvpr, SplitsAtTheMiniBatchsSizeAndNotAtOneRequests) {
  const auto policy = make_policy("kvpr", {.profile = h200_profile()});
  EXPECT_EQ(kinds(*policy, policy->allocate(opt_6_7b_inputs(256 * 8, 8)), 8), "AAAAAAKK");
  const Allocation longer = policy->allocate(opt_6_7b_inputs(128 * 66, 66));
  EXPECT_EQ(kinds(*policy, longer, 66).find('K'), 52u) << "0.79 of 66";
}

TEST(Kvpr, RowByRowHasOneMiniBatchAndItsContextOnTheHost) {
  const auto policy = make_policy("kvpr", {.row_by_row = true, .profile = h200_profile()});
  const Allocation split = policy->allocate(opt_6_7b_inputs(256 * 8, 8));
  EXPECT_EQ(split.act_blocks + split.kv_blocks, 512u);
  EXPECT_EQ(split.gpu_act_blocks + split.gpu_kv_blocks, 0u);
  EXPECT_TRUE(split.placed) << "no more of them on the device";
  EXPECT_EQ(kinds(*policy, split, 8), "AAAAAAKK");
}

}  // namespace
}  // namespace poise
