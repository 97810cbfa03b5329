#include "planner/policies/packing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <random>

#include "common/trouble.h"

namespace poise {
namespace {

const PackBalance kHalves = balance_of(Allocation{.act_blocks = 100, .kv_blocks = 100});
constexpr PackLimits kRoomy{
    .act_slots = 16, .kv_slots = 16, .tokens = 512, .rows = 64, .sequences = 8};

PackItem item(int act, int kv, int rows = 1) {
  return {.act_slots = act, .kv_slots = kv, .act_loads = act, .kv_loads = kv, .rows = rows};
}

// Checked from first principles: sums against limits, one by one.
bool allowed(const PackLimits& limits, std::span<const PackItem> items,
             const MiniBatchItems& batch) {
  int act = 0, kv = 0, rows = 0;
  for (const std::int32_t i : batch) {
    act += items[static_cast<std::size_t>(i)].act_slots;
    kv += items[static_cast<std::size_t>(i)].kv_slots;
    rows += items[static_cast<std::size_t>(i)].rows;
  }
  return act <= limits.act_slots && kv <= limits.kv_slots && rows <= limits.rows &&
         static_cast<int>(batch.size()) <= limits.sequences &&
         (batch.size() == 1 || (act + kv) * 16 <= limits.tokens);
}

void expect_a_partition(std::span<const PackItem> items, const PackLimits& limits,
                        const std::vector<MiniBatchItems>& batches) {
  std::vector<int> seen(items.size(), 0);
  for (const MiniBatchItems& batch : batches) {
    EXPECT_FALSE(batch.empty());
    EXPECT_TRUE(allowed(limits, items, batch));
    EXPECT_EQ(within(limits, items, batch), allowed(limits, items, batch));
    for (const std::int32_t i : batch) {
      ++seen[static_cast<std::size_t>(i)];
    }
  }
  EXPECT_TRUE(std::ranges::all_of(seen, [](int n) { return n == 1; }));
}

// The fewest mini-batches there can be, by trying everything.
std::size_t fewest(std::span<const PackItem> items, const PackLimits& limits) {
  std::size_t best = items.size();
  std::vector<MiniBatchItems> batches;
  const std::function<void(std::size_t)> place = [&](std::size_t i) {
    if (batches.size() >= best && i < items.size()) {
      return;
    }
    if (i == items.size()) {
      best = std::min(best, batches.size());
      return;
    }
    for (std::size_t b = 0; b < batches.size(); ++b) {
      batches[b].push_back(static_cast<std::int32_t>(i));
      if (allowed(limits, items, batches[b])) {
        place(i + 1);
      }
      batches[b].pop_back();
    }
    batches.push_back({static_cast<std::int32_t>(i)});
    place(i + 1);
    batches.pop_back();
  };
  place(0);
  return best;
}

std::vector<PackItem> random_items(std::mt19937& random, std::size_t count) {
  std::vector<PackItem> items;
  for (std::size_t i = 0; i < count; ++i) {
    const int act = static_cast<int>(random() % 9), kv = static_cast<int>(random() % 9);
    PackItem one = item(act, std::max(kv, act == 0 ? 1 : 0), 1 + static_cast<int>(random() % 20));
    one.act_loads = static_cast<int>(random() % static_cast<unsigned>(one.act_slots + 1));
    one.kv_loads = static_cast<int>(random() % static_cast<unsigned>(one.kv_slots + 1));
    items.push_back(one);
  }
  return items;
}

TEST(Packing, PlainPacksInOrderAsLongAsThereIsRoom) {
  const std::vector<PackItem> items{item(10, 0), item(8, 0), item(6, 0), item(8, 0)};
  EXPECT_EQ(pack_plainly(items, kRoomy), (std::vector<MiniBatchItems>{{0, 2}, {1, 3}}));
}

TEST(Packing, ASequenceBeyondTheTokenLimitGoesAlone) {
  PackLimits limits = kRoomy;
  limits.tokens = 64;
  const std::vector<PackItem> items{item(1, 1), item(4, 4), item(1, 1)};
  EXPECT_EQ(pack_plainly(items, limits), (std::vector<MiniBatchItems>{{0, 2}, {1}}));
}

TEST(Packing, ASequenceThatFitsNowhereIsADefect) {
  const std::vector<PackItem> items{item(17, 0)};
  EXPECT_THROW(pack_plainly(items, kRoomy), Defect);
  EXPECT_THROW(pack_balanced(kHalves, items, kRoomy), Defect);
}

TEST(Packing, NothingIsPackedIntoNothing) {
  EXPECT_TRUE(pack_plainly({}, kRoomy).empty());
  EXPECT_TRUE(pack_balanced(kHalves, {}, kRoomy).empty());
}

TEST(Packing, ImbalanceIsOneWhereBothSidesTakeTheSameTime) {
  constexpr double kInfinite = std::numeric_limits<double>::infinity();
  EXPECT_EQ(kHalves.imbalance(4, 4), 1);
  EXPECT_EQ(kHalves.imbalance(8, 4), 2);
  EXPECT_EQ(kHalves.imbalance(4, 8), 2);
  EXPECT_EQ(balance_of(Allocation{.act_blocks = 300, .kv_blocks = 100}).imbalance(6, 2), 1);
  EXPECT_EQ(kHalves.imbalance(0, 3), kInfinite);
  EXPECT_EQ(kHalves.imbalance(3, 0), kInfinite);
  EXPECT_EQ(kHalves.imbalance(0, 0), 1);
}

TEST(Packing, ImbalanceIsThatOfAProfilesLines) {
  Profile profile;
  profile.kv_gen = {.a = 10, .b = 1, .points = {{.n = 4, .time = {100}}}};
  profile.load_kv = {.a = 4, .b = 2};
  const PackBalance balance = balance_of(profile);
  EXPECT_DOUBLE_EQ(balance.imbalance(20, 13), 1) << "30 s each";
  EXPECT_DOUBLE_EQ(balance.imbalance(2, 1), 2) << "12 s of making, 6 s of loading";
}

// KV blocks of the device are read in place: they take none of the link's time. ACT blocks there are
// made into K and V as those of the host are (Eq. 3).
TEST(Packing, ImbalanceCountsWhatCrossesTheLinkAndWhatIsMade) {
  const PackBalance balance = balance_of(
      Allocation{.act_blocks = 100, .kv_blocks = 100, .gpu_act_blocks = 100, .gpu_kv_blocks = 300});
  EXPECT_EQ(balance.imbalance(4, 2), 1) << "200 ACT blocks are made while 100 KV blocks cross";
}

TEST(Packing, BlocksOfTheDeviceAreNoLoads) {
  // Each request has 4 ACT and 4 KV blocks; of the latter, the device has all of the first four's. One of
  // either sort makes 8 ACT blocks while 4 KV blocks cross.
  PackItem here = item(4, 0);
  here.kv_here = 4;
  std::vector<PackItem> items(4, here);
  items.insert(items.end(), 4, item(4, 4));
  const PackBalance two_acts_for_a_kv{.kv_gen = {.b = 1}, .load_kv = {.b = 2}};
  for (const MiniBatchItems& batch : pack_balanced(two_acts_for_a_kv, items, kRoomy)) {
    EXPECT_EQ(std::ranges::count_if(batch, [](std::int32_t i) { return i < 4; }),
              std::ssize(batch) / 2)
        << testing::PrintToString(batch);
  }
}

TEST(Packing, BalancedBringsTogetherWhatBalances) {
  // Four all-ACT and four all-KV requests: in order, two mini-batches would be all-ACT and all-KV.
  std::vector<PackItem> items;
  for (int i = 0; i < 8; ++i) {
    items.push_back(i < 4 ? item(4, 0) : item(0, 4));
  }
  PackLimits limits = kRoomy;
  limits.sequences = 4;
  for (const MiniBatchItems& batch : pack_balanced(kHalves, items, limits)) {
    int act = 0, kv = 0;
    for (const std::int32_t i : batch) {
      act += items[static_cast<std::size_t>(i)].act_loads;
      kv += items[static_cast<std::size_t>(i)].kv_loads;
    }
    EXPECT_EQ(kHalves.imbalance(act, kv), 1) << batch.size();
  }
}

TEST(Packing, RequestsOfOneRatioFillTheirMiniBatches) {
  const std::vector<PackItem> items(16, item(3, 2));  // none of them lowers the imbalance
  const auto batches = pack_balanced(kHalves, items, kRoomy);
  EXPECT_EQ(batches.size(), pack_plainly(items, kRoomy).size());
}

// Whatever share of ACT blocks Algorithm 1 hides behind weights, and however much of a small mini-batch
// are constants.
TEST(Packing, RequestsOfOneRatioFillTheirMiniBatchesByAnyLines) {
  std::mt19937 random(5);
  const auto draw = [&](double most) {
    return std::uniform_real_distribution<double>(0.01, most)(random);
  };
  for (int round = 0; round < 300; ++round) {
    const PackBalance balance{.kv_gen = {.a = draw(40), .b = draw(4)},
                              .load_kv = {.a = draw(40), .b = draw(4)}};
    const std::vector<PackItem> items(
        40, item(static_cast<int>(random() % 4), 1 + static_cast<int>(random() % 4)));
    EXPECT_EQ(pack_balanced(balance, items, kRoomy).size(), pack_plainly(items, kRoomy).size())
        << round;
  }
}

TEST(Packing, NewPromptsJoinWhateverTheBalance) {
  std::vector<PackItem> items(4, item(3, 2));
  PackItem fresh = item(2, 2, 8);
  fresh.act_loads = fresh.kv_loads = 0;
  items.insert(items.begin() + 1, 2, fresh);
  EXPECT_EQ(pack_balanced(kHalves, items, kRoomy).size(), 1u);
}

TEST(Packing, EveryItemIsPackedAndNoLimitIsBroken) {
  for (std::uint32_t seed = 1; seed <= 300; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    const auto items = random_items(random, random() % 60);
    const PackLimits limits{.act_slots = 8 + static_cast<int>(random() % 30),
                            .kv_slots = 8 + static_cast<int>(random() % 30),
                            .tokens = 16 + static_cast<int>(random() % 600),
                            .rows = 20 + static_cast<int>(random() % 60),
                            .sequences = 1 + static_cast<int>(random() % 12)};
    const Allocation host{.act_blocks = static_cast<std::uint32_t>(random() % 5),
                          .kv_blocks = static_cast<std::uint32_t>(random() % 5)};
    expect_a_partition(items, limits, pack_plainly(items, limits));
    expect_a_partition(items, limits, pack_balanced(balance_of(host), items, limits));
    expect_a_partition(items, limits, pack_evenly(items, limits));
  }
}

TEST(Packing, PlainIsNearTheFewestMiniBatchesThereCanBe) {
  for (std::uint32_t seed = 1; seed <= 60; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    const auto items = random_items(random, 1 + random() % 8);
    const std::size_t best = fewest(items, kRoomy);
    const std::size_t plain = pack_plainly(items, kRoomy).size();
    EXPECT_GE(plain, best);
    EXPECT_LE(plain, best + best / 2 + 1);
    EXPECT_GE(pack_balanced(kHalves, items, kRoomy).size(), best);
  }
}

// What a pipeline feels: in each mini-batch the slower side is waited for.
double waited(std::span<const PackItem> items, const std::vector<MiniBatchItems>& batches) {
  double sum = 0, whole_act = 0, whole_kv = 0;
  for (const PackItem& one : items) {
    whole_act += one.act_loads;
    whole_kv += one.kv_loads;
  }
  for (const MiniBatchItems& batch : batches) {
    double act = 0, kv = 0;
    for (const std::int32_t i : batch) {
      act += items[static_cast<std::size_t>(i)].act_loads;
      kv += items[static_cast<std::size_t>(i)].kv_loads;
    }
    sum += std::max(act * whole_kv, kv * whole_act);  // in units in which the whole is balanced
  }
  return sum;
}

// The least that can be waited, and that with as few mini-batches as there can be, by trying all.
double least_waited(std::span<const PackItem> items, const PackLimits& limits, std::size_t most) {
  double best = std::numeric_limits<double>::infinity();
  std::vector<MiniBatchItems> batches;
  const std::function<void(std::size_t)> place = [&](std::size_t i) {
    if (i == items.size()) {
      best = std::min(best, waited(items, batches));
      return;
    }
    for (std::size_t b = 0; b < batches.size(); ++b) {
      batches[b].push_back(static_cast<std::int32_t>(i));
      if (allowed(limits, items, batches[b])) {
        place(i + 1);
      }
      batches[b].pop_back();
    }
    if (batches.size() < most) {
      batches.push_back({static_cast<std::int32_t>(i)});
      place(i + 1);
      batches.pop_back();
    }
  };
  place(0);
  return best;
}

TEST(Packing, EvenIsNearTheOptimumAndNoWorseThanTheGreedyRule) {
  double even_waited = 0, greedy_waited = 0, best_waited = 0;
  std::size_t even_count = 0, greedy_count = 0, best_count = 0;
  for (std::uint32_t seed = 1; seed <= 120; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    std::vector<PackItem> items;
    Allocation host;
    for (std::size_t i = 0; i < 4 + random() % 5; ++i) {
      items.push_back(item(1 + static_cast<int>(random() % 7), 1 + static_cast<int>(random() % 7)));
      host.act_blocks += static_cast<std::uint32_t>(items.back().act_loads);
      host.kv_blocks += static_cast<std::uint32_t>(items.back().kv_loads);
    }
    const auto even = pack_evenly(items, kRoomy);
    const auto greedy = pack_balanced(balance_of(host), items, kRoomy);
    expect_a_partition(items, kRoomy, even);
    const std::size_t least = fewest(items, kRoomy);
    EXPECT_LE(even.size(), pack_plainly(items, kRoomy).size());
    even_count += even.size();
    greedy_count += greedy.size();
    best_count += least;
    even_waited += waited(items, even);
    greedy_waited += waited(items, greedy);
    best_waited += least_waited(items, kRoomy, least);
  }
  std::printf(
      "mini-batches: even %zu, greedy %zu, fewest %zu; waited to the least with the fewest: "
      "even %.3f, greedy %.3f\n",
      even_count, greedy_count, best_count, even_waited / best_waited, greedy_waited / best_waited);
  EXPECT_LE(even_count, greedy_count);
  EXPECT_LE(static_cast<double>(even_count), 1.1 * static_cast<double>(best_count));
  EXPECT_LE(even_waited, 1.2 * best_waited);
}

TEST(Packing, BalancedIsBetterBalancedThanPlainOnTheWhole) {
  double plain_sum = 0, balanced_sum = 0;
  for (std::uint32_t seed = 1; seed <= 100; ++seed) {
    std::mt19937 random(seed);
    std::vector<PackItem> items;
    for (int i = 0; i < 40; ++i) {
      const int act = static_cast<int>(random() % 9);
      items.push_back(item(act, 8 - act));
    }
    // What a pipeline feels: in each mini-batch the slower side is waited for.
    const auto waited = [&](const std::vector<MiniBatchItems>& batches) {
      double sum = 0;
      for (const MiniBatchItems& batch : batches) {
        double act = 0, kv = 0;
        for (const std::int32_t i : batch) {
          act += items[static_cast<std::size_t>(i)].act_loads;
          kv += items[static_cast<std::size_t>(i)].kv_loads;
        }
        sum += std::max(act, kv);
      }
      return sum;
    };
    plain_sum += waited(pack_plainly(items, kRoomy));
    balanced_sum += waited(pack_balanced(kHalves, items, kRoomy));
  }
  EXPECT_LT(balanced_sum, plain_sum);
}

}  // namespace
}  // namespace poise
