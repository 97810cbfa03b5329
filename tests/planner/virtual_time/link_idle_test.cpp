#include "planner/virtual_time/link_idle.h"

#include <gtest/gtest.h>

#include <random>
#include <utility>
#include <vector>

#include "planner/virtual_time/virtual_executor.h"
#include "tests/planner/virtual_time/one_request.h"
#include "tests/support/small_shape.h"

namespace poise {
namespace {

constexpr std::int32_t kStackedLayers = 12;

// A block of either kind takes a second over the link, a row two in the products.
Profile seconds_of_uneven_work() {
  Profile profile;
  profile.load_kv.b = profile.load_act.b = 1;
  profile.load_here.b = 1.5;
  profile.kv_gen.b = 0.5;
  profile.attention.b = 0.25;
  profile.prefill.b = 0.125;
  profile.qkv.b = 0.5;
  profile.forward.b = 2;
  profile.host_attention.b = 0.75;
  profile.host_up.b = 0.125;
  return profile;
}

// Of a mini-batch of one request: blocks over the link, new rows, ACT blocks on the device. Host cores attend that of `on_host`.
struct BatchWork {
  std::uint32_t act, kv, rows, here = 0;
  bool on_host = false;
};
messages::IterationT tables_of(const std::vector<BatchWork>& works) {
  using messages::Kind, messages::Place, messages::Where;
  messages::IterationT tables;
  for (const auto& [act, kv, rows, here, on_host] : works) {
    auto batch = testing_support::one_request(tables.mini_batches.size(), act, kv, rows);
    if (here > 0) {
      batch->loads.emplace_back(Kind::Act, Place::Gpu, kBlockTokens, here, 0, 0);
      batch->regenerate.emplace_back(act, here);
    }
    if (on_host) {
      batch->loads.clear();
      batch->entries.emplace_back(Where::HostInPlace, Kind::Kv, Place::Host, 0, 0, 0);
    }
    tables.mini_batches.push_back(std::move(batch));
  }
  return tables;
}

std::vector<Seconds> idle_of(const Profile& profile, const messages::IterationT& tables,
                             const DeviceLimits& limits, std::int32_t layers) {
  std::vector<BatchCost> costs;
  for (const auto& batch : tables.mini_batches) {
    costs.push_back(batch_cost(profile, *batch, limits, 0));
  }
  const auto groups = row_groups(tables, limits.max_mini_batch_rows);
  std::vector<GroupCost> products;
  for (const RowGroup& group : groups) {
    products.push_back({profile.qkv_of(group.rows), profile.forward_of(group.rows)});
  }
  return link_idle(costs, groups, products, static_cast<std::size_t>(limits.sides), layers);
}

DeviceLimits limits_of(std::int32_t resident, std::int32_t sides) {
  return {.resident_layers = resident, .max_mini_batch_rows = 8, .sides = sides};
}

std::vector<VirtualSpan> loads_of(const Profile& profile, const messages::IterationT& tables,
                                  const DeviceLimits& limits) {
  const WeightLayout layout =
      weight_layout(testing_support::small_shape(kStackedLayers), DType::float16);
  VirtualExecutor executor(profile, layout, limits);
  std::vector<VirtualSpan> spans;
  executor.trace(&spans);
  executor.run(tables, true);
  std::erase_if(spans, [](const VirtualSpan& span) {
    return span.kind != VirtualSpan::Kind::load;
  });
  return spans;
}

std::vector<BatchWork> random_works(std::mt19937& random) {
  std::vector<BatchWork> works(1 + random() % 7);
  for (BatchWork& work : works) {
    work = {.act = static_cast<std::uint32_t>(random() % 4),
            .kv = static_cast<std::uint32_t>(random() % 12),
            .rows = static_cast<std::uint32_t>(1 + random() % 8),
            .here = static_cast<std::uint32_t>(random() % 9)};
  }
  for (std::size_t i = random() % 3; i > 0; --i) {  // behind all others, as in a run
    works.push_back({.act = 0,
                     .kv = static_cast<std::uint32_t>(1 + random() % 12),
                     .rows = 1,
                     .on_host = true});
  }
  return works;
}

// Where all layers are on the device, the gaps between loads in virtual time equal link_idle's. One that loads nothing lies in a gap.
TEST(LinkIdle, IsTheGapsBetweenLoadsInVirtualTime) {
  std::mt19937 random(7);
  const Profile profile = seconds_of_uneven_work();
  int gaps = 0, on_host = 0;
  for (int trial = 0; trial < 400; ++trial) {
    const std::vector<BatchWork> works = random_works(random);
    const auto tables = tables_of(works);
    const DeviceLimits limits =
        limits_of(kStackedLayers, 2 + static_cast<std::int32_t>(random() % 2));
    const auto loads = loads_of(profile, tables, limits);
    const auto idle = idle_of(profile, tables, limits, kStackedLayers);
    for (std::size_t i = 1; i < loads.size(); ++i) {
      const VirtualSpan &before = loads[i - 1], &next = loads[i];
      const bool same = before.mini_batch == next.mini_batch && before.layer == next.layer;
      if (same || next.layer + 1 < kStackedLayers || before.layer != next.layer) {
        continue;  // both kinds of one mini-batch, or the pattern has not settled
      }
      double expected = 0;
      for (std::size_t batch = before.mini_batch; batch < next.mini_batch; ++batch) {
        expected += idle[batch].n;
      }
      EXPECT_NEAR((next.begin - before.end).n, expected, 1e-6)
          << "trial " << trial << ", from " << before.mini_batch << " to " << next.mini_batch;
      gaps += expected > 0 ? 1 : 0;
      on_host += expected > 0 && works.back().on_host ? 1 : 0;
    }
  }
  EXPECT_GT(gaps, 200);
  EXPECT_GT(on_host, 100);
}

// Their queries go down before the device's, so they are done while it is at work: the link is as idle as without them.
TEST(LinkIdle, HostCoresBeginWhenTheirQueriesAreMade) {
  Profile profile = seconds_of_uneven_work();
  std::vector<BatchWork> works{{0, 4, 8}, {0, 4, 8}, {0, 4, 8}, {0, 8, 1, 0, true}};
  const DeviceLimits limits = limits_of(kStackedLayers, 2);
  const auto with = idle_of(profile, tables_of(works), limits, kStackedLayers);
  profile.host_attention.b = 0;
  const auto without = idle_of(profile, tables_of(works), limits, kStackedLayers);
  ASSERT_GT(without[0].n + without[1].n + without[2].n, 1);
  for (std::size_t i = 0; i < works.size(); ++i) {
    EXPECT_NEAR(with[i].n, without[i].n, 1e-9) << i;
  }
}

// From the end of layer 1 to that of layer 4.
Seconds three_layers(const Profile& profile, const messages::IterationT& tables,
                     std::int32_t resident) {
  const WeightLayout layout = weight_layout(testing_support::small_shape(kStackedLayers),
                                            DType::float16, {1 << 10});
  VirtualExecutor executor(profile, layout, limits_of(resident, 2));
  executor.run(tables, false);  // the next one finds its first layers fetched
  std::vector<VirtualSpan> spans;
  executor.trace(&spans);
  executor.run(tables, true);
  Seconds begin{}, end{};
  for (const VirtualSpan& span : spans) {
    if (span.kind == VirtualSpan::Kind::products) {
      begin = span.layer == 1 ? span.end : begin;
      end = span.layer == 4 ? span.end : end;
    }
  }
  return end - begin;
}

// A prompt's attention takes half of a layer's time, in which the link waits for its side. Weights behind all loads alike would
// delay those of the mini-batches behind it, for which computation waits.
TEST(LinkIdle, WeightsThatFillItTakeNoTime) {
  Profile profile = seconds_of_uneven_work();
  profile.forward.b = 0.1;
  profile.load_w.b = 8;  // a layer's
  const auto tables = tables_of({{0, 1, 8}, {0, 10, 1}, {0, 10, 1}, {0, 10, 1}});
  const Seconds resident = three_layers(profile, tables, kStackedLayers);
  EXPECT_GT(resident.n, 100);
  EXPECT_NEAR(three_layers(profile, tables, 0).n, resident.n, 1e-9);
}

}  // namespace
}  // namespace poise
