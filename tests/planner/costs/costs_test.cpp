#include "planner/costs/costs.h"

#include <gtest/gtest.h>

#include "planner/policies/default_policy.h"

namespace poise::test {
namespace {

constexpr bool kIsHost = true, kIsGpu = false;

TEST(DefaultPolicy, IsTheOneThatCostsDecideWhereADeviceComputesBesideTheLink) {
  EXPECT_EQ(policy_or_default(std::nullopt, kIsGpu, {}, {}), "optimal");
  EXPECT_EQ(policy_or_default(std::nullopt, kIsHost, {}, {}), "kv-only");
  EXPECT_EQ(policy_or_default(std::nullopt, kIsHost, {.machine = "a100-pcie4"}, {}), "optimal");
  EXPECT_EQ(policy_or_default(std::nullopt, kIsHost, {.profile = "profile.json"}, {}), "optimal");
}

TEST(DefaultPolicy, WithAShareIsOneThatTakesShares) {
  for (const bool device_is_host : {kIsHost, kIsGpu}) {
    EXPECT_EQ(policy_or_default(std::nullopt, device_is_host, {}, {.act_share = 0.5}), "hybrid");
  }
}

TEST(DefaultPolicy, IsNotAskedForWhereOneWasNamed) {
  EXPECT_EQ(policy_or_default("kvpr", kIsGpu, {}, {.act_share = 0.5}), "kvpr");
  EXPECT_EQ(policy_or_default("row-by-row", kIsHost, {}, {}), "row-by-row");
}

}  // namespace
}  // namespace poise::test
