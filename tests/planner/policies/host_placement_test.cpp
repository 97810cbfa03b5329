#include "planner/policies/host_placement.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <utility>

#include "planner/policies/allocation.h"
#include "planner/policies/best_placement.h"
#include "planner/policies/work_time.h"

namespace poise {
namespace {

struct ThreeWayCase {
  Profile profile;
  AllocationInputs inputs;
};

// A few requests, blocks, layers and bytes, so that everything can be tried.
ThreeWayCase random_three_way(std::mt19937& random) {
  const auto up_to = [&](double most) {
    return std::uniform_real_distribution<double>(0, most)(random);
  };
  ThreeWayCase c;
  c.profile.load_w = {.b = up_to(10)};
  c.profile.load_kv = {.a = up_to(1), .b = 0.1 + up_to(4)};
  c.profile.load_act = {.a = up_to(1), .b = 0.1 + up_to(2)};
  c.profile.kv_gen = {.b = 0.1 + up_to(2)};
  c.profile.attention = {.b = up_to(0.4)};
  c.profile.forward = {.a = up_to(2), .b = 0.1};
  c.profile.head = {.a = 0.5, .b = 0.1};
  c.profile.store_kv = c.profile.store_act = {.b = up_to(0.5)};
  c.profile.host_attention = {.b = 0.1 + up_to(4)};
  c.profile.host_down = {.b = up_to(0.5)};
  c.profile.host_up = {.b = up_to(0.2)};
  c.inputs.sizes = {.kv_row = {512}, .act_row = {256}};
  c.inputs.layers = 1 + static_cast<std::int32_t>(random() % 3);
  c.inputs.sequences = 1 + static_cast<std::int32_t>(random() % 4);
  c.inputs.most_blocks = c.inputs.sequences * (1 + static_cast<std::int64_t>(random() % 3));
  c.inputs.requests = c.inputs.sequences;
  c.inputs.prompt_rows = c.inputs.most_blocks * kBlockTokens / 2;
  c.inputs.largest_request = 1;
  c.inputs.host = Bytes{static_cast<std::int64_t>(40'000 + up_to(160'000.0))} * c.inputs.layers;
  const auto device = static_cast<std::int64_t>(up_to(120'000));
  c.inputs.device =
      DeviceRoom{.layer = {20'000},
                 .streaming = {10'000},
                 .left = [device](std::int64_t act, std::int64_t kv, std::int64_t of_host) {
                   return Bytes{device - 3000 * act - 1500 * (kv + of_host)};
                 }};
  c.inputs.resident_layers = [device, layers = c.inputs.layers](std::int64_t act, std::int64_t kv,
                                                                std::int64_t of_host) {
    const std::int64_t left = device - 3000 * act - 1500 * (kv + of_host);
    return left + 10'000 >= 20'000 * layers
               ? layers
               : static_cast<std::int32_t>(std::clamp<std::int64_t>(left / 20'000, 0, layers));
  };
  return c;
}

double time_of(const ThreeWayCase& c, const AllocationInputs& rest, const Allocation& blocks) {
  return work_time(c.profile, c.inputs, with_host(rest, blocks),
                   least_times(c.profile, rest, blocks));
}

// Every number of requests on host cores; of the others' blocks every split, every place for every block, and
// every number of layers. Nothing where not all blocks fit whatever is done.
std::optional<double> least_of_three(const ThreeWayCase& c) {
  std::optional<double> least;
  const auto take = [&](double time) { least = std::min(least.value_or(time), time); };
  for (std::int32_t n = 0; n <= c.inputs.sequences; ++n) {
    const auto rest = beside_host(c.inputs, n);
    if (!rest) {
      continue;
    }
    if (rest->most_blocks == 0) {
      for (std::int32_t layers = 0; layers <= rest->resident_layers(0, 0, rest->host_blocks);
           ++layers) {
        take(time_of(c, *rest, {.placed = true, .resident_layers = layers}));
      }
      continue;
    }
    const std::int64_t act_size = rest->sizes.block(BlockKind::act).n;
    const std::int64_t kv_size = rest->sizes.block(BlockKind::kv).n;
    const std::int64_t region = rest->host.n / rest->layers / kRegionAlignment * kRegionAlignment;
    for (std::int64_t act = 0; act <= rest->most_blocks; ++act) {
      const std::int64_t kv = rest->most_blocks - act, left = rest->device->left(act, kv, 0).n;
      for (std::int64_t here_act = 0; here_act <= act; ++here_act) {
        for (std::int64_t here_kv = 0; here_kv <= kv; ++here_kv) {
          const std::int64_t host = (act - here_act) * act_size + (kv - here_kv) * kv_size;
          for (std::int32_t layers = 0; layers <= rest->layers; ++layers) {
            const std::int64_t device = rest->device->layer.n * layers +
                                        (here_act * act_size + here_kv * kv_size) * rest->layers -
                                        (layers == rest->layers ? rest->device->streaming.n : 0);
            if (left < 0 || device > left || host > region || host == 0) {
              continue;
            }
            const auto count = [](std::int64_t blocks) {
              return static_cast<std::uint32_t>(blocks);
            };
            take(time_of(c, *rest,
                         {.act_blocks = count(act - here_act),
                          .kv_blocks = count(kv - here_kv),
                          .gpu_act_blocks = count(here_act),
                          .gpu_kv_blocks = count(here_kv),
                          .placed = true,
                          .resident_layers = layers}));
          }
        }
      }
    }
  }
  return least;
}

// The requests that `blocks` has on host cores, and the others' blocks.
std::pair<AllocationInputs, Allocation> parted(const ThreeWayCase& c, Allocation blocks) {
  const auto n = static_cast<std::int32_t>(std::lround(blocks.host_share * c.inputs.sequences));
  blocks.kv_blocks -= blocks.host_blocks;
  blocks.host_blocks = 0;
  blocks.host_share = 0;
  return {*beside_host(c.inputs, n), blocks};
}

TEST(ThreeWay, IsThatOfTryingThemAll) {
  int compared = 0, on_host = 0, on_device = 0, both = 0;
  for (std::uint32_t seed = 1; seed <= 300; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    const ThreeWayCase c = random_three_way(random);
    const auto least = least_of_three(c);
    const Allocation best = best_three_way(c.profile, c.inputs);
    if (!least || best.all_act_blocks() + best.all_kv_blocks() < c.inputs.most_blocks) {
      continue;  // not all blocks fit
    }
    const auto [rest, blocks] = parted(c, best);
    EXPECT_NEAR(time_of(c, rest, blocks), *least, 1e-5 * *least);
    ++compared;
    on_host += best.host_share == 1 ? 1 : 0;
    on_device += best.host_share == 0 ? 1 : 0;
    both += best.host_share > 0 && best.host_share < 1 ? 1 : 0;
  }
  EXPECT_GT(compared, 150);
  EXPECT_GT(on_host, 10);
  EXPECT_GT(on_device, 10);
  EXPECT_GT(both, 30);
}

// Numbers that can be followed by hand: eight requests of ten blocks, two layers, half of the requests on host cores.
TEST(ThreeWay, AnIterationTakesTheLongestOfFour) {
  Profile profile;
  profile.load_w.b = 1;
  profile.load_kv.b = 1;
  profile.attention.b = 0.125;
  profile.forward.b = 0.25;
  profile.store_kv.b = 0.5;
  profile.host_attention.b = 0.5;
  profile.host_down.b = 0.25;
  profile.host_up.b = 0.125;
  AllocationInputs inputs;
  inputs.sizes = {.kv_row = {512}, .act_row = {256}};
  inputs.layers = 2;
  inputs.sequences = 8;
  inputs.requests = 8;
  inputs.most_blocks = 80;
  inputs.prompt_rows = 80 * kBlockTokens;  // contexts are full all the time
  inputs.host = kGiB;
  const auto rest = beside_host(inputs, 4);
  ASSERT_TRUE(rest);
  EXPECT_EQ(rest->sequences, 4);
  EXPECT_EQ(rest->most_blocks, 40);
  EXPECT_EQ(rest->host_blocks, 40);
  EXPECT_EQ((inputs.host - rest->host).n, 2 * (40 * 16 * 512 + 4096));
  const IterationTime time = iteration_time(profile, *rest, {.kv_blocks = 40});
  EXPECT_DOUBLE_EQ(time.link.n, 2 * (40 + 1));
  EXPECT_DOUBLE_EQ(time.compute.n, 2 * (40 * 0.125 + 8 * 0.25 + 4 * 0.125));
  EXPECT_DOUBLE_EQ(time.host.n, 2 * (40 * 0.5 + 4 * 0.25 + 4 * 0.125 + 8 * 0.25));
  EXPECT_DOUBLE_EQ(time.back.n, 2 * (4 * 0.5 + 4 * 0.25));
  EXPECT_DOUBLE_EQ(time.longest().n, 82);
  const Allocation all = with_host(*rest, {.kv_blocks = 40});
  EXPECT_EQ(all.kv_blocks, 80u);
  EXPECT_EQ(all.device_kv_blocks(), 40);
  EXPECT_DOUBLE_EQ(all.host_share, 0.5);
  profile.kv_slowdown = 1.5;
  profile.act_slowdown = 3;
  profile.host_attention.b = 8;  // all the time that the link works
  EXPECT_DOUBLE_EQ(iteration_time(profile, *rest, {.kv_blocks = 40}).link.n, 2 * (40 * 1.5 + 3))
      << "weights are slowed as ACT blocks are";
}

TEST(ThreeWay, OfAnyNumbersOfRequestsAboutTheShareIsOnHostCores) {
  for (const double share : {0.0, 0.1, 0.25, 1.0 / 3, 0.5, 0.9, 1.0}) {
    Allocation blocks;
    blocks.host_share = share;
    int on_host = 0;
    for (std::uint32_t id = 17; id < 17 + 64; ++id) {
      on_host += attended_on_host(blocks, {id}) ? 1 : 0;
    }
    EXPECT_NEAR(on_host, 64 * share, 1) << share;
  }
}

}  // namespace
}  // namespace poise
