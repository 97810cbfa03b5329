#include "planner/policies/algorithm1.h"

#include <gtest/gtest.h>

#include <random>

namespace poise {
namespace {

// A KV block takes 2 s of the link, an ACT block 3 s of computation, a layer's weights 12 s.
Algorithm1 example() {
  return {.load_w = {12},
          .kv_gen = {.b = 3},
          .load_kv = {.b = 2},
          .host = {1000 + 1600},
          .weights = {1000},
          .kv_block = {20},
          .act_block = {10}};
}

TEST(Algorithm1, ByHandWhereWeightsTakeLongerThanTheGpusBlocks) {
  // Step 1: 12 s of weights hide ACT_init = 4 blocks. Step 2: 1600 - 40 = 10·act + 20·kv and
  // 3·act = 2·kv give act = 1560 / 40 = 39, kv = 58.5.
  const HostBlocksSplit split = algorithm1(example());
  EXPECT_NEAR(split.act, 4 + 39, 1e-9);
  EXPECT_NEAR(split.kv, 58.5, 1e-9);
}

TEST(Algorithm1, ByHandWhereTheGpusBlocksTakeLongerThanWeights) {
  // Step 1: 10 blocks on the GPU take 30 s, 18 more than the weights: KV_init = 9. Step 2:
  // 1600 - 180 = 40·act gives act = 35.5, kv = 53.25.
  Algorithm1 given = example();
  given.act_gpu = 10;
  const HostBlocksSplit split = algorithm1(given);
  EXPECT_NEAR(split.act, 35.5, 1e-9);
  EXPECT_NEAR(split.kv, 9 + 53.25, 1e-9);
}

TEST(Algorithm1, ByHandWithConstantParts) {
  // ACT_init = (12 - 6) / 3 = 2, and the constant is paid. Then 3·act = 2·kv and 10·act + 20·kv = 1580
  // give act = 39.5, kv = 59.25.
  Algorithm1 given = example();
  given.kv_gen.a = 6;
  const HostBlocksSplit split = algorithm1(given);
  EXPECT_NEAR(split.act, 2 + 39.5, 1e-9);
  EXPECT_NEAR(split.kv, 59.25, 1e-9);
}

TEST(Algorithm1, ByHandWhereWeightsTakeLessThanAConstant) {
  // No block is made in 12 s. 20 + 3·act = 12 + 2·kv and 10·act + 20·kv = 1600 give act = 38, kv = 61.
  Algorithm1 given = example();
  given.kv_gen.a = 20;
  const HostBlocksSplit split = algorithm1(given);
  EXPECT_NEAR(split.act, 38, 1e-9);
  EXPECT_NEAR(split.kv, 61, 1e-9);
}

TEST(Algorithm1, InTooSmallAHostTakesWhatThereIsOfStepOne) {
  Algorithm1 given = example();
  given.host = {1000 + 30};
  EXPECT_NEAR(algorithm1(given).act, 3, 1e-9);
  EXPECT_EQ(algorithm1(given).kv, 0);
  given.host = {900};
  EXPECT_EQ(algorithm1(given).act_share(), 0);
}

TEST(Algorithm1, FilledOnlyInPartBalancesThatPart) {
  // 3·act = 12 + 2·kv and act + kv = 44: act = 20, kv = 24.
  const HostBlocksSplit split = algorithm1_filled(example(), 44);
  EXPECT_NEAR(split.act, 20, 0.1);
  EXPECT_NEAR(split.kv, 24, 0.1);
  EXPECT_EQ(algorithm1_filled(example(), 1e6).act, algorithm1(example()).act);
}

TEST(Algorithm1, BalancesBothSidesAndFillsTheHost) {
  std::mt19937 random(11);
  const auto between = [&](double least, double most) {
    return std::uniform_real_distribution<double>(least, most)(random);
  };
  for (int round = 0; round < 1000; ++round) {
    Algorithm1 given{.load_w = {between(0, 50)},
                     .kv_gen = {.a = between(0, 20), .b = between(0.1, 5)},
                     .load_kv = {.a = between(0, 20), .b = between(0.1, 5)},
                     .act_gpu = between(0, 30),
                     .host = {static_cast<std::int64_t>(between(2e6, 1e8))},
                     .weights = {1000000},
                     .kv_block = {static_cast<std::int64_t>(between(100, 1000))},
                     .act_block = {static_cast<std::int64_t>(between(100, 1000))}};
    const HostBlocksSplit split = algorithm1(given);
    ASSERT_GE(split.act, 0);
    ASSERT_GE(split.kv, 0);
    const double bytes = split.act * static_cast<double>(given.act_block.n) +
                         split.kv * static_cast<double>(given.kv_block.n);
    ASSERT_NEAR(bytes, static_cast<double>((given.host - given.weights).n), 1);
    const double pcie = given.load_w.n + given.load_kv(split.kv).n;
    const double computation = given.kv_gen(split.act + given.act_gpu).n;
    ASSERT_NEAR(pcie, computation, 1e-6 * pcie) << round;
  }
}

}  // namespace
}  // namespace poise
