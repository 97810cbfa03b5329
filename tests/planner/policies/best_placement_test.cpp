#include "planner/policies/best_placement.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "planner/policies/allocation.h"

namespace poise {
namespace {

struct Case {
  Profile profile;
  AllocationInputs inputs;
};

// A few blocks, layers and bytes, so that everything can be tried. Lines have constants or none.
Case random_case(std::mt19937& random) {
  const auto up_to = [&](double most) {
    return std::uniform_real_distribution<double>(0, most)(random);
  };
  const auto line = [&](double b) {
    return Line{.a = random() % 3 == 0 ? up_to(4 * b) : 0, .b = b * (0.1 + up_to(2))};
  };
  Case c;
  c.profile.load_w = {.b = up_to(40)};
  c.profile.load_kv = line(2);
  c.profile.load_act = line(1);
  c.profile.kv_gen = line(1);
  c.profile.attention = line(0.2);
  c.profile.forward = {.a = up_to(2), .b = 0.01};
  c.profile.head = {.a = 0.5};
  c.profile.store_kv = c.profile.store_act = {.b = up_to(0.5)};
  const std::int64_t rows[] = {256, 512, 768, 1024};  // of which some make ACT the larger kind
  c.inputs.sizes = {.kv_row = {rows[random() % 4]}, .act_row = {rows[random() % 4]}};
  c.inputs.layers = 1 + static_cast<std::int32_t>(random() % 4);
  c.inputs.most_blocks = 4 + static_cast<std::int64_t>(random() % 12);
  c.inputs.sequences = 1 + static_cast<std::int32_t>(random() % 4);
  c.inputs.requests = c.inputs.sequences;
  c.inputs.prompt_rows = c.inputs.most_blocks * kBlockTokens;
  c.inputs.largest_request = 2;
  c.inputs.mini_batch = random() % 2 == 0 ? 0 : 5;
  c.inputs.host = Bytes{static_cast<std::int64_t>(up_to(16 * 16 * 1024.0))} * c.inputs.layers;
  const auto device = static_cast<std::int64_t>(up_to(200'000));
  const std::int64_t act_buffer = 2000 + static_cast<std::int64_t>(up_to(6000));
  c.inputs.device =
      DeviceRoom{.layer = {5000 + static_cast<std::int64_t>(up_to(20'000))},
                 .streaming = {10'000},
                 .left = [device, act_buffer](std::int64_t act, std::int64_t kv, std::int64_t) {
                   return Bytes{device - act_buffer * act -
                                1500 * kv};  // an ACT block's buffers are the larger
                 }};
  return c;
}

// Every split, every place for every block, every number of layers. Stated from the bounds alone.
std::optional<double> least_of_all(const Case& c) {
  const AllocationInputs& in = c.inputs;
  const std::int64_t act_size = in.sizes.block(BlockKind::act).n;
  const std::int64_t kv_size = in.sizes.block(BlockKind::kv).n;
  const std::int64_t region = in.host.n / in.layers / kRegionAlignment * kRegionAlignment;
  std::optional<double> least;
  for (std::int64_t act = 0; act <= in.most_blocks; ++act) {
    const std::int64_t kv = in.most_blocks - act, left = in.device->left(act, kv, 0).n;
    for (std::int64_t here_act = 0; here_act <= act; ++here_act) {
      for (std::int64_t here_kv = 0; here_kv <= kv; ++here_kv) {
        const std::int64_t host = (act - here_act) * act_size + (kv - here_kv) * kv_size;
        for (std::int32_t layers = 0; layers <= in.layers; ++layers) {
          const std::int64_t device = in.device->layer.n * layers +
                                      (here_act * act_size + here_kv * kv_size) * in.layers -
                                      (layers == in.layers ? in.device->streaming.n : 0);
          if (left < 0 || device > left || host > region || host == 0) {
            continue;
          }
          const auto n = [](std::int64_t blocks) { return static_cast<std::uint32_t>(blocks); };
          const double time = iteration_time(c.profile, in,
                                             {.act_blocks = n(act - here_act),
                                              .kv_blocks = n(kv - here_kv),
                                              .gpu_act_blocks = n(here_act),
                                              .gpu_kv_blocks = n(here_kv),
                                              .resident_layers = layers})
                                  .longest()
                                  .n;
          least = std::min(least.value_or(time), time);
        }
      }
    }
  }
  return least;
}

TEST(BestPlacement, IsThatOfTryingThemAll) {
  int compared = 0;
  for (std::uint32_t seed = 1; seed <= 600; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    const Case c = random_case(random);
    const auto least = least_of_all(c);
    if (!least) {
      continue;  // not all blocks fit
    }
    double found = std::numeric_limits<double>::infinity();
    for (std::int64_t act = 0; act <= c.inputs.most_blocks; ++act) {
      if (const auto best = best_placement(c.profile, c.inputs, act, c.inputs.most_blocks - act)) {
        found = std::min(found, iteration_time(c.profile, c.inputs, *best).longest().n);
      }
    }
    EXPECT_NEAR(found, *least, 1e-5 * *least);
    ++compared;
  }
  EXPECT_GT(compared, 200);
}

// Four requests with ten ACT and six KV blocks each at the end of their answers, in two mini-batches.
TEST(IterationTime, CountsWhatRowsPayForAbsorbing) {
  auto profile = std::make_shared<Profile>();
  profile->kv_gen = {.a = 1, .b = 20};
  profile->attention = {.b = 2};
  profile->absorb_rows = {.a = 7, .b = 30};
  profile->absorb = {.b = 3};
  AllocationInputs inputs;
  inputs.layers = 2;
  inputs.most_blocks = 64;
  inputs.sequences = inputs.requests = 4;
  inputs.prompt_rows = 64 * kBlockTokens;
  inputs.mini_batch = 32;
  const Allocation blocks{.act_blocks = 40, .kv_blocks = 24};
  EXPECT_NEAR(iteration_time(*deciding_costs(profile, false), inputs, blocks).compute.n,
              2 * (2 * (1 + 20 * 20) + 2 * 64), 1e-9);
  EXPECT_NEAR(iteration_time(*deciding_costs(profile, true), inputs, blocks).compute.n,
              2 * (2 * (7 + 30 * 2 + 3 * 18) + 2 * 24), 1e-9);
}

TEST(BestAllocation, StaysWithinBothMemoriesAndHoldsWhatFits) {
  int full = 0;
  for (std::uint32_t seed = 1; seed <= 600; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    const Case c = random_case(random);
    const Allocation best = best_allocation(c.profile, c.inputs);
    const std::int64_t all = best.all_act_blocks() + best.all_kv_blocks();
    if (all == 0) {
      EXPECT_FALSE(least_of_all(c));
      continue;
    }
    const BlockSizes& sizes = c.inputs.sizes;
    const Bytes host =
        sizes.block(BlockKind::act) * best.act_blocks + sizes.block(BlockKind::kv) * best.kv_blocks;
    EXPECT_LE(host * c.inputs.layers, c.inputs.host);
    EXPECT_GT(host.n, 0) << "a pool has a block";
    const Bytes here = sizes.block(BlockKind::act) * best.gpu_act_blocks +
                       sizes.block(BlockKind::kv) * best.gpu_kv_blocks;
    EXPECT_LE(here * c.inputs.layers + c.inputs.device->layer * best.resident_layers.value(),
              c.inputs.device->left(best.all_act_blocks(), best.all_kv_blocks(), 0) +
                  (best.resident_layers == c.inputs.layers ? c.inputs.device->streaming : Bytes{}));
    EXPECT_LE(all, c.inputs.most_blocks);
    full += all == c.inputs.most_blocks ? 1 : 0;
  }
  EXPECT_GT(full, 200);
}

TEST(BestAllocation, BeyondTryingEveryShareIsAsGoodToAThousandth) {
  for (std::uint32_t seed = 1; seed <= 40; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    Case c = random_case(random);
    c.inputs.most_blocks = kEveryShare * 2 + static_cast<std::int64_t>(random() % 900);
    c.inputs.prompt_rows = c.inputs.most_blocks * kBlockTokens;
    c.inputs.host = kGiB;
    const std::int64_t room = static_cast<std::int64_t>(random() % 40'000'000);
    c.inputs.device->left = [=](std::int64_t act, std::int64_t, std::int64_t) {
      return Bytes{room + 10'000'000 - 3000 * act};
    };
    double least = std::numeric_limits<double>::infinity();
    for (std::int64_t act = 0; act <= c.inputs.most_blocks; ++act) {
      if (const auto best = best_placement(c.profile, c.inputs, act, c.inputs.most_blocks - act)) {
        least = std::min(least, iteration_time(c.profile, c.inputs, *best).longest().n);
      }
    }
    const Allocation best = best_allocation(c.profile, c.inputs);
    EXPECT_LE(iteration_time(c.profile, c.inputs, best).longest().n, 1.001 * least);
  }
}

TEST(BestAllocation, KeepsKeysAndValuesWhereActivationsAreTheLarger) {
  Case c;
  c.profile.load_w = {.b = 10};
  c.inputs = {.sizes = {.kv_row = {2048}, .act_row = {8192}},  // 8 of 32 heads have keys
              .layers = 4,
              .host = kGiB,
              .most_blocks = 300,
              .largest_request = 10,
              .requests = 30,
              .sequences = 30,
              .prompt_rows = 4000};
  c.profile.load_kv = {.b = 1};
  c.profile.load_act = {.b = 4};
  c.profile.kv_gen = {.b = 0.01};
  EXPECT_EQ(best_allocation(c.profile, c.inputs).act_blocks, 0u);
  c.profile.load_act = {.b = 0.5};  // as with a key for each query
  c.inputs.sizes = {.kv_row = {8192}, .act_row = {4096}};
  EXPECT_EQ(best_allocation(c.profile, c.inputs).kv_blocks, 0u);
}

}  // namespace
}  // namespace poise
