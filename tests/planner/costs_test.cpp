#include "planner/costs.h"

#include <gtest/gtest.h>

namespace poise::test {
namespace {

constexpr bool kHost = true, kGpu = false;

TEST(DefaultPolicy, IsTheOneThatCostsDecideWhereADeviceComputesBesideTheLink) {
  EXPECT_EQ(policy_or_default(std::nullopt, kGpu, {}, {}), "optimal");
  EXPECT_EQ(policy_or_default(std::nullopt, kHost, {}, {}), "kv-only");
  EXPECT_EQ(policy_or_default(std::nullopt, kHost, {.machine = "a100-pcie4"}, {}), "optimal");
  EXPECT_EQ(policy_or_default(std::nullopt, kHost, {.profile = "profile.json"}, {}), "optimal");
}

TEST(DefaultPolicy, WithAShareIsOneThatTakesShares) {
  for (const bool device_is_host : {kHost, kGpu}) {
    EXPECT_EQ(policy_or_default(std::nullopt, device_is_host, {}, {.act_share = 0.5}), "hybrid");
  }
}

TEST(DefaultPolicy, IsNotAskedForWhereOneWasNamed) {
  EXPECT_EQ(policy_or_default("kvpr", kGpu, {}, {.act_share = 0.5}), "kvpr");
  EXPECT_EQ(policy_or_default("row-by-row", kHost, {}, {}), "row-by-row");
}

}  // namespace
}  // namespace poise::test
