// CAPTURE's policy: what Algorithm 1 is asked, and by what mini-batches are balanced. The algorithm by
// itself: algorithm1_test.cpp; the packing: packing_test.cpp.

#include <gtest/gtest.h>

#include <vector>

#include "planner/forecast/simulate_papers.h"
#include "tests/planner/policies/policy_inputs.h"

namespace poise {
namespace {

TEST(Hybrid, WithAProfileBalancesLinkAndComputationAsAlgorithm1Does) {
  const auto profile = std::make_shared<Profile>(
      profile_of(machine_named("rtx4090-pcie4"), opt_shape("opt-30b"), DType::float16));
  AllocationInputs from = inputs(block_sizes(opt_shape("opt-30b"), DType::float16, KvFormat::plain),
                                 kGiB * 800, 128 * 128);
  from.layers = 48;
  const Allocation split = make_policy("hybrid", {.profile = profile})->allocate(from);
  EXPECT_NEAR(split.act_blocks + split.kv_blocks, 128 * 128, 1);
  const double link = profile->load_w(1).n + profile->load_kv(split.kv_blocks).n;
  EXPECT_NEAR(profile->kv_gen(split.act_blocks).n, link, 0.001 * link);
  // A share that is given is taken.
  const Allocation given =
      make_policy("hybrid", {.act_share = 0.25, .profile = profile})->allocate(from);
  EXPECT_EQ(given.act_blocks, 128u * 32);
}

TEST(Hybrid, ChargesNoWeightsForLayersThatStayOnTheDevice) {
  const auto policy = make_policy("hybrid", {.profile = h200_profile()});
  AllocationInputs from = opt_6_7b_inputs(128 * 66, 66);
  const auto share = [&] {
    const Allocation split = policy->allocate(from);
    return static_cast<double>(split.act_blocks) / (split.act_blocks + split.kv_blocks);
  };
  from.fixed.resident_layers = 0;
  EXPECT_NEAR(share(), 0.94, 0.01);
  from.fixed.resident_layers = 32;
  EXPECT_NEAR(share(), 0.80, 0.01);
  // As many as fit beside the buffers for the split.
  from.fixed = {};
  from.resident_layers = [](std::int64_t act, std::int64_t kv, std::int64_t) {
    return act > 0 && kv > 0 ? 32 : 0;
  };
  EXPECT_NEAR(share(), 0.80, 0.01);
  from.resident_layers = [](std::int64_t, std::int64_t, std::int64_t) { return 16; };
  EXPECT_NEAR(share(), 0.87, 0.01);
}

// Both sides as long over all mini-batches, each with the constants of its copy and its product.
TEST(Hybrid, ChargesConstantsOnceAMiniBatch) {
  const auto profile = h200_profile();
  for (const std::int32_t mini_batch : {32, 512}) {
    AllocationInputs from = opt_6_7b_inputs(8192, 8);
    from.mini_batch = mini_batch;
    from.fixed.resident_layers = 32;
    const Allocation split = make_policy("hybrid", {.profile = profile})->allocate(from);
    const double parts = 8192.0 / mini_batch;
    const double making = parts * profile->kv_gen.straight(split.act_blocks / parts).n;
    const double loading = parts * profile->load_kv.straight(split.kv_blocks / parts).n;
    EXPECT_NEAR(making, loading, 0.005 * loading) << mini_batch;
  }
}

TEST(Hybrid, PacksByTheProfilesLines) {
  auto profile = std::make_shared<Profile>();
  profile->load_w = {.b = 1};
  profile->kv_gen = {.b = 1};
  profile->load_kv = {.b = 1};
  // An ACT block takes as long as a KV block, though the pool has three times as many.
  const Allocation host{.act_blocks = 300, .kv_blocks = 100};
  std::vector<PackItem> items;
  for (const int act : {6, 6, 2, 2}) {
    items.push_back({.act_slots = act, .kv_slots = 8 - act, .act_loads = act, .kv_loads = 8 - act});
  }
  const PackLimits limits{
      .act_slots = 16, .kv_slots = 16, .tokens = 256, .rows = 16, .sequences = 2};
  const auto batches = make_policy("hybrid", {.profile = profile})->pack(host, items, limits);
  EXPECT_EQ(batches, (std::vector<MiniBatchItems>{{0, 2}, {1, 3}}));
}

}  // namespace
}  // namespace poise
