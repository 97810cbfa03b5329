// Single rows that attend activations as they are, beside everything else that attention reads.

#include <gtest/gtest.h>

#include "tests/gpu_executor/absorbing_plan.h"

namespace poise::test {
namespace {

// The places an iteration's attention reads from, by Where, and those of the device behind them.
void count_places(const Planned& planned, std::map<int, int>& places) {
  for (const auto& batch : planned.tables.mini_batches) {
    for (const messages::AttentionEntry& entry : batch->entries) {
      ++places[static_cast<int>(entry.where()) + (entry.place() == messages::Place::Gpu ? 10 : 0)];
    }
  }
}

// Tolerances are those of plans that absorb nothing (pipeline_test.cpp): an absorbed key is rounded nowhere.
TEST(Absorption, GivesTheReferencesLogitsWithBlocksScatteredOverAllPlaces) {
  const std::pair<DType, double> kinds[] = {
      {DType::float32, 2e-4}, {DType::float16, 5e-3}, {DType::bfloat16, 4e-2}};
  std::uint32_t seed = 1;
  for (const ModelShape& shape : {tiny_shape(), post_norm_shape(), with_shared_keys()}) {
    for (const auto& [dtype, tolerance] : kinds) {
      const TinyModel model(shape, dtype, 20 + seed);
      Plan plan = scattered(shape, seed);
      plan.per_batch = 1 + static_cast<std::int32_t>(seed % 3);
      plan.chunk = seed % 2 == 0 ? 7 : 1000;
      Setting setting = absorbing();
      setting.limits.resident_layers = static_cast<std::int32_t>(seed % 4);
      setting.device.jitter = seed;
      expect_as_plain(model, plan, run_pipeline(model, plan, setting), tolerance);
      ++seed;
    }
  }
}

TEST(Absorption, PlansOfTheseTestsReadFromAllPlaces) {
  const TinyModel model(tiny_shape(), DType::float32, 3);
  const Setting setting = absorbing();
  const PoolPartition pool{.region_bytes = 1 << 20, .act_blocks = 64, .kv_blocks = 64};
  std::map<int, int> places;
  const Plan plan = scattered(model.shape, 1);
  SmallPlanner planner(plan, model.layout, setting.limits, pool);
  for (Planned planned = planner.next(); !planned.orders.empty(); planned = planner.next()) {
    count_places(planned, places);
  }
  for (const int place : {0, 1, 2, 3, 10, 11, 12}) {
    EXPECT_GT(places[place], 3) << place;
  }
}

// With the blocks that are absorbed given, and by which rows, nothing else changes a bit.
class SameAbsorbedBits : public testing::TestWithParam<DType> {
 protected:
  SameAbsorbedBits() : model_(tiny_shape(), GetParam(), 11), plan_(scattered(model_.shape, 5)) {
    plan_.edits = true;
    Plan plan = plan_;
    plan.per_batch = 1;
    plan.seed = 0;
    Setting setting = absorbing();
    setting.limits.resident_layers = 3;
    setting.device.synchronous = true;
    expected_ = run_pipeline(model_, plan, setting).rows;
    EXPECT_EQ(expected_.size(), 37u + 45 + 1 + 60 + 30 + 53 + 41 + 28);
  }

  void expect_same(const Plan& plan, const Setting& setting = absorbing()) {
    EXPECT_TRUE(run_pipeline(model_, plan, setting).rows == expected_);
  }

  const TinyModel model_;
  Plan plan_;
  decltype(Outcome::rows) expected_;
};

TEST_P(SameAbsorbedBits, WhateverTheOtherBlocksHoldAndWhereverTheyAre) {
  for (const std::int32_t here : {0, 3, 40}) {
    for (const BlockKind other : {BlockKind::kv, BlockKind::act}) {
      Plan plan = plan_;
      plan.kind = [&](std::uint32_t request, std::uint32_t block) {
        return plan_.absorbed(request, block) ? BlockKind::act : other;
      };
      Setting setting = absorbing();
      setting.limits.gpu_act_blocks = setting.limits.gpu_kv_blocks = here;
      setting.device.jitter = static_cast<std::uint64_t>(here + 1);
      setting.hold = here == 3;
      expect_same(plan, setting);
    }
  }
}

TEST_P(SameAbsorbedBits, WhereverOtherSequencesAreAttended) {
  Plan plan = plan_;
  plan.on_host = nullptr;
  plan.absorbed = [this](std::uint32_t request, std::uint32_t block) {
    return request % 4 != 0 && plan_.absorbed(request, block);
  };
  expect_same(plan);
  plan.on_host = [](std::uint32_t request) { return request == 0; };
  expect_same(plan);
}

TEST_P(SameAbsorbedBits, HoweverMiniBatchesAndPromptsAreCut) {
  for (const std::int32_t per_batch : {1, 2, 8}) {
    for (const std::int32_t chunk : {1, 5, 1000}) {
      Plan plan = plan_;
      plan.per_batch = per_batch;
      plan.chunk = chunk;
      plan.chunks_at_once = chunk == 5 ? 3 : 1;
      plan.seed = static_cast<std::uint32_t>(per_batch + chunk);
      expect_same(plan);
    }
  }
}

TEST_P(SameAbsorbedBits, HoweverManyThreadsAndWhateverOverlaps) {
  for (std::uint64_t seed = 1; seed <= 6; ++seed) {
    Plan plan = plan_;
    plan.late_weights = seed == 2;
    plan.per_batch = seed == 4 ? 8 : 2;
    Setting setting = absorbing();
    setting.limits.resident_layers = static_cast<std::int32_t>(seed % 3);
    setting.limits.max_sequences = seed == 5 ? 3 : 8;
    setting.device.threads = 1 + static_cast<int>(seed % 3);
    setting.device.jitter = seed;
    setting.hold = seed % 2 == 0;
    expect_same(plan, setting);
  }
}

// The tests above would pass if nothing were absorbed.
TEST_P(SameAbsorbedBits, AreOthersThanThoseOfKeysThatAreMade) {
  Plan plan = plan_;
  plan.absorbed = nullptr;
  const auto made = run_pipeline(model_, plan, absorbing()).rows;
  EXPECT_FALSE(made == expected_);
  int prompt_rows = 0;
  for (const auto& [row, bits] : made) {
    if (row.second <= 20) {  // prompts regenerate
      EXPECT_EQ(bits, expected_.at(row));
      ++prompt_rows;
    }
  }
  EXPECT_GT(prompt_rows, 100);
}

INSTANTIATE_TEST_SUITE_P(Absorption, SameAbsorbedBits,
                         testing::Values(DType::float32, DType::float16, DType::bfloat16),
                         [](const auto& info) { return std::string(name_of(info.param)); });

}  // namespace
}  // namespace poise::test
