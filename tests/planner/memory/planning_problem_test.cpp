// What stands already leaves a plan to decide: the same at a start, a swap and a takeover. Concurrency and
// memory plans by themselves: concurrency_test.cpp, memory_plan_test.cpp.

#include "planner/memory/planning_problem.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/weight_layout.h"
#include "planner/forecast/simulate_papers.h"
#include "tests/support/complaint.h"
#include "tests/support/model_files.h"

namespace poise {
namespace {

using testing_support::complaint;
using testing_support::tiny_shape;

// Requests of 10 blocks each, 4 at a time.
PlanningProblem small_problem(Bytes cap) {
  PlanningProblem problem{.shape = tiny_shape(),
                          .dtype = DType::float32,
                          .requests = {},
                          .batch = {.max_num_seqs = 4},
                          .budget = {.available = kMiB * 128, .host_memory = {}},
                          .device = {.cap = cap, .overhead = {}, .holds_blocks = false}};
  for (std::uint32_t i = 1; i <= 8; ++i) {
    problem.requests.push_back({.id = {i}, .prompt = 100, .answer = 61});
  }
  return problem;
}

// The same with the pool that `policy` was given.
PlanningProblem with_pool_of(const char* policy, PlanningProblem problem) {
  const BlockSizes sizes = block_sizes(problem.shape, problem.dtype, KvFormat::plain);
  const Allocation host = solve(*make_policy(policy, {}), problem).host;
  problem.fixed.pool = {.region_bytes = region_bytes(sizes, host),
                        .act_blocks = host.act_blocks,
                        .kv_blocks = host.kv_blocks};
  return problem;
}

TEST(Absorption, IsRefusedWithASentenceWhereTheModelDoesNotDoIt) {
  PlanningProblem problem = small_problem(kMiB * 64);
  problem.batch.absorption = true;
  const auto refusal = [&] {
    return complaint([&] { solve(*make_policy("act-only", {}), problem); });
  };
  EXPECT_TRUE(solve(*make_policy("act-only", {}), problem).device.absorption);
  problem.batch.kv_format = KvFormat::int8;
  EXPECT_THAT(refusal(), testing::HasSubstr("kept as codes (--kv-cache-dtype)"));
  problem.batch.kv_format = KvFormat::plain;
  problem.shape.rotary.kind = RotaryKind::plain;
  EXPECT_THAT(refusal(), testing::HasSubstr("its keys are rotated by their position"));
  problem.batch.absorption = false;
  EXPECT_FALSE(solve(*make_policy("act-only", {}), problem).device.absorption);
}

TEST(APoolThatStands, IsSplitAnewAndHasBuffersForBothSplitsMeanwhile) {
  const PlanningProblem problem = with_pool_of("kv-only", small_problem(kMiB * 64));
  ASSERT_EQ(problem.fixed.pool->kv_blocks, 40u);
  const RunPlan plan = solve(*make_policy("act-only", {}), problem);
  EXPECT_EQ(plan.host.kv_blocks, 0u);
  EXPECT_EQ(plan.host.act_blocks, 40u);
  EXPECT_GE(plan.device_meanwhile.act_slots, 10) << "a request may be all ACT";
  EXPECT_GE(plan.device_meanwhile.kv_slots, 10) << "KV blocks of before are still there";
  EXPECT_EQ(plan.device.kv_slots, 0) << "once the border rests there are none";
}

TEST(BuffersThatStand, SufficeWhereTheyHoldMoreSlotsAndAreElseTheSame) {
  const PlanningProblem problem = with_pool_of("kv-only", small_problem(kMiB * 64));
  const DeviceLimits wanted = solve(*make_policy("act-only", {}), problem).device_meanwhile;
  EXPECT_TRUE(suffices(wanted, wanted));
  DeviceLimits more = wanted;
  ++more.act_slots;
  EXPECT_TRUE(suffices(more, wanted));
  EXPECT_FALSE(suffices(wanted, more));
  more = wanted;
  ++more.max_rows;
  EXPECT_FALSE(suffices(more, wanted)) << "schedules go by it";
}

TEST(APoolThatStands, IsRefusedInWordsWhereTheLargestRequestFindsNoRoom) {
  PlanningProblem problem = with_pool_of("act-only", small_problem(kMiB * 64));
  problem.batch.max_num_seqs = 1;
  PoolPartition& pool = *problem.fixed.pool;
  pool = {.region_bytes = pool.region_bytes / 4, .act_blocks = pool.act_blocks / 4, .kv_blocks = 0};
  EXPECT_NO_THROW(solve(*make_policy("act-only", {}), problem));
  const std::string half = complaint([&] { solve(*make_policy("kv-only", {}), problem); });
  EXPECT_NE(half.find("has room for 5 blocks with"), std::string::npos) << half;
  EXPECT_NE(half.find("largest request (line 1) takes 10"), std::string::npos) << half;
  EXPECT_NE(half.find("--rebuild"), std::string::npos) << "the remedy: " << half;
  const BlockSizes sizes = block_sizes(problem.shape, problem.dtype, KvFormat::plain);
  pool = {.region_bytes = region_bytes(sizes, {.act_blocks = 1}), .act_blocks = 1, .kv_blocks = 0};
  const std::string one = complaint([&] { solve(*make_policy("act-only", {}), problem); });
  EXPECT_NE(one.find("has room for 2 blocks with"), std::string::npos) << one;
}

// ---- OPT-6.7B on an H200 capped at 24 GiB

class StandingResources : public testing::Test {
 protected:
  StandingResources() {
    problem_.profile =
        std::make_shared<const Profile>(profile_of(machine_named("h200-pcie5"), shape_, dtype_));
    for (std::uint32_t i = 1; i <= 256; ++i) {
      problem_.requests.push_back({.id = {i}, .prompt = 512, .answer = 64});
    }
  }

  std::unique_ptr<Policy> policy(std::string_view name) const {
    Machine machine = machine_named("h200-pcie5");
    machine.host = policy_named(name).attends_on_host ? 150 : 0;
    return make_policy(
        name, {.profile = std::make_shared<const Profile>(profile_of(machine, shape_, dtype_))});
  }
  // All that a run under `plan` has made, with contexts on the device.
  PlanningProblem after(const RunPlan& plan) const {
    PlanningProblem problem = problem_;
    problem.fixed = {.pool = PoolPartition{.region_bytes = region_bytes(sizes_, plan.host),
                                           .act_blocks = plan.host.act_blocks,
                                           .kv_blocks = plan.host.kv_blocks},
                     .placement = {},
                     .running = plan.demand.sequences};
    if (plan.host.gpu_act_blocks + plan.host.gpu_kv_blocks > 0) {
      problem.fixed.placement.gpu_act_blocks = plan.host.gpu_act_blocks;
      problem.fixed.placement.gpu_kv_blocks = plan.host.gpu_kv_blocks;
    }
    if (plan.released_layers > 0) {
      problem.fixed.placement.resident_layers = plan.released_layers;
      problem.budget.weights =
          problem.budget.weights - weight_layout(shape_, dtype_).layer.bytes * plan.released_layers;
    }
    return problem;
  }

  const ModelShape shape_ = opt_shape("opt-6.7b");
  const DType dtype_ = DType::float16;
  const BlockSizes sizes_ = block_sizes(shape_, dtype_, KvFormat::plain);
  PlanningProblem problem_{.shape = shape_,
                           .dtype = dtype_,
                           .requests = {},
                           .batch = {.max_num_seqs = 128},
                           .budget = {.weights = weight_layout(shape_, dtype_).total(),
                                      .available = kGiB * 90,
                                      .host_memory = {}},
                           .device = {.cap = kGiB * 24, .overhead = kGiB, .attends_on_host = true}};
};

// Whatever the policy before and after: nothing that stands is changed, and all fits.
TEST_F(StandingResources, StayAsTheyAreUnderEveryOtherPolicy) {
  problem_.batch.prompt_rows = problem_.batch.prefill_tokens;  // how many is best takes a rehearsal for each number
  for (const PolicyEntry& first : policies()) {
    const RunPlan before = solve(*policy(first.name), problem_);
    const PlanningProblem problem = after(before);
    for (const PolicyEntry& second : policies()) {
      SCOPED_TRACE(fmt::format("{} after {}", second.name, first.name));
      const RunPlan plan = solve(*policy(second.name), problem);
      const PoolPartition split{.region_bytes = problem.fixed.pool->region_bytes,
                                .act_blocks = plan.host.act_blocks,
                                .kv_blocks = plan.host.kv_blocks};
      EXPECT_TRUE(split.fits(sizes_));
      if (problem.fixed.placement.fixes_blocks()) {
        EXPECT_EQ(plan.host.gpu_act_blocks, before.host.gpu_act_blocks);
        EXPECT_EQ(plan.host.gpu_kv_blocks, before.host.gpu_kv_blocks);
      }
      if (before.released_layers > 0) {
        EXPECT_EQ(plan.device.resident_layers, before.released_layers);
      }
      EXPECT_GE(plan.demand.sequences, std::min(before.demand.sequences, 128));
      for (const DeviceLimits& limits : {plan.device, plan.device_meanwhile}) {
        EXPECT_EQ(limits.gpu_act_blocks, static_cast<std::int32_t>(plan.host.gpu_act_blocks));
        EXPECT_EQ(limits.gpu_kv_blocks, static_cast<std::int32_t>(plan.host.gpu_kv_blocks));
        EXPECT_LE(plan_device_memory(shape_, dtype_, limits, plan.overhead).total,
                  problem_.device.cap);
      }
    }
  }
}

TEST_F(StandingResources, HostCoresAttendOnlyWhereTheyAreKnown) {
  PlanningProblem problem = problem_;
  EXPECT_GT(solve(*policy("host-kv"), problem).host.host_share, 0);
  problem.device.attends_on_host = false;
  const std::string told =
      testing_support::complaint([&] { solve(*policy("host-kv"), problem); });
  EXPECT_NE(told.find("host_gbps"), std::string::npos) << told;
}

// The policy knows the device: with most weights there, and not as if every layer were streamed.
TEST_F(StandingResources, OptimalDecidesByThemAndNotAsIfEveryLayerWereStreamed) {
  const RunPlan before = solve(*policy("kv-only"), problem_);
  ASSERT_GT(before.device.resident_layers, shape_.num_hidden_layers / 2);
  const RunPlan known = solve(*policy("optimal"), after(before));
  PlanningProblem blind = after(before);
  blind.device.holds_blocks = false;
  const RunPlan bounds = solve(*policy("optimal"), blind);
  EXPECT_NE(known.host, bounds.host);
  EXPECT_TRUE(known.host.placed);
}

TEST_F(StandingResources, LeaveTheDeviceToActOnlyWhereNoContextLiesThere) {
  const RunPlan before = solve(*policy("row-by-row"), problem_);
  ASSERT_EQ(before.host.gpu_act_blocks + before.host.gpu_kv_blocks, 0u);
  EXPECT_GT(solve(*policy("act-only"), problem_).host.gpu_act_blocks, 0u);
  EXPECT_GT(solve(*policy("act-only"), after(before)).host.gpu_act_blocks, 0u);
}

}  // namespace
}  // namespace poise
