#include "planner/virtual_time/link_idle.h"

#include <gtest/gtest.h>

#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "planner/virtual_time/virtual_executor.h"
#include "tests/support/small_shape.h"

namespace poise {
namespace {

constexpr std::int32_t kStackedLayers = 6;

// A block of either kind takes a second over the link, a row two in the products.
Profile seconds_of_uneven_work() {
  Profile profile;
  profile.load_kv.b = profile.load_act.b = 1;
  profile.kv_gen.b = 0.5;
  profile.attention.b = 0.25;
  profile.prefill.b = 0.125;
  profile.forward.b = 2;
  return profile;
}

// A mini-batch for each pair: one request, so many of its blocks of each kind come over the link, with so many new rows.
struct BatchWork {
  std::uint32_t act, kv, rows;
};
messages::IterationT tables_of(const std::vector<BatchWork>& works) {
  messages::IterationT tables;
  for (const auto& [act, kv, rows] : works) {
    auto batch = std::make_unique<messages::MiniBatchT>();
    batch->id = static_cast<std::uint32_t>(tables.mini_batches.size());
    batch->tokens.assign(rows, 1);
    batch->sequences.emplace_back(1, (act + kv) * kBlockTokens, rows, 0, 0);
    using messages::Kind, messages::Place;
    if (kv > 0) {
      batch->loads.emplace_back(Kind::Kv, Place::Host, kBlockTokens, kv, 0, 0);
    }
    if (act > 0) {
      batch->loads.emplace_back(Kind::Act, Place::Host, kBlockTokens, act, 0, 0);
      batch->regenerate.emplace_back(0, act);
    }
    tables.mini_batches.push_back(std::move(batch));
  }
  return tables;
}

std::vector<Seconds> idle_of(const Profile& profile, const messages::IterationT& tables,
                             const DeviceLimits& limits) {
  std::vector<BatchCost> costs;
  for (const auto& batch : tables.mini_batches) {
    costs.push_back(batch_cost(profile, *batch, limits, 0));
  }
  const auto groups = row_groups(tables, limits.max_mini_batch_rows);
  std::vector<GroupCost> products;
  for (const RowGroup& group : groups) {
    products.push_back({profile.qkv_of(group.rows), profile.forward_of(group.rows)});
  }
  return link_idle(costs, groups, products, static_cast<std::size_t>(limits.sides));
}

DeviceLimits limits_of(std::int32_t resident, std::int32_t sides) {
  return {.resident_layers = resident, .max_mini_batch_rows = 8, .sides = sides};
}

// Where all layers are on the device, the gaps between loads in virtual time are what is said.
TEST(LinkIdle, IsTheGapsBetweenLoadsInVirtualTime) {
  std::mt19937 random(7);
  const Profile profile = seconds_of_uneven_work();
  int gaps = 0;
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<BatchWork> works(2 + random() % 6);
    for (BatchWork& work : works) {
      work = {.act = static_cast<std::uint32_t>(random() % 4),
              .kv = static_cast<std::uint32_t>(1 + random() % 12),
              .rows = static_cast<std::uint32_t>(1 + random() % 8)};
    }
    const auto tables = tables_of(works);
    const DeviceLimits limits = limits_of(kStackedLayers, 2 + static_cast<std::int32_t>(random() % 2));
    const WeightLayout layout =
        weight_layout(testing_support::small_shape(kStackedLayers), DType::float16);
    VirtualExecutor executor(profile, layout, limits);
    std::vector<VirtualSpan> spans;
    executor.trace(&spans);
    executor.run(tables, true);
    const auto idle = idle_of(profile, tables, limits);
    const VirtualSpan* before = nullptr;
    for (const VirtualSpan& span : spans) {
      if (span.kind != VirtualSpan::Kind::load) {
        continue;
      }
      const bool other = before != nullptr && (before->mini_batch != span.mini_batch || before->layer != span.layer);
      if (other && before->layer + 2 >= kStackedLayers) {
        EXPECT_NEAR((span.begin - before->end).n, idle[before->mini_batch].n, 1e-9)
            << "trial " << trial << ", layer " << before->layer << ", behind "
            << before->mini_batch;
        gaps += idle[before->mini_batch].n > 0 ? 1 : 0;
      }
      before = &span;
    }
  }
  EXPECT_GT(gaps, 100);
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
