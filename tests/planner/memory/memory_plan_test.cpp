// Where everything of a run lies; what a policy's split and the device's room are by themselves:
// sizes_test.cpp.

#include "planner/memory/memory_plan.h"

#include <gtest/gtest.h>

#include "common/trouble.h"
#include "common/weight_layout.h"
#include "planner/forecast/simulate_papers.h"

namespace poise {
namespace {

class Arranged : public testing::Test {
 protected:
  MemoryPlan with(const char* policy, Bytes host_memory, const RunDevice& device,
                  std::optional<std::int32_t> resident = std::nullopt) const {
    const auto made = make_policy(policy, {.profile = profile_});
    PlanningProblem problem{
        .shape = shape_,
        .dtype = DType::float16,
        .requests = {},
        .budget = {.weights = weights_, .available = kGiB * 1000, .host_memory = host_memory},
        .device = device,
        .profile = profile_};
    problem.fixed.placement.resident_layers = resident;
    return plan_memory(*made, problem, demand_);
  }
  Bytes pool(const MemoryPlan& made) const {
    return Bytes{static_cast<std::int64_t>(
               region_bytes(block_sizes(shape_, DType::float16, KvFormat::plain), made.host))} *
           shape_.num_hidden_layers;
  }

  const ModelShape shape_ = opt_shape("opt-13b");
  const WeightLayout layout_ = weight_layout(shape_, DType::float16);
  const Bytes weights_ = layout_.total();
  // 128 requests of 544 tokens: 4,352 blocks, 26.6 GiB as ACT.
  const Demand demand_{.requests = 128,
                       .sequences = 128,
                       .longest_context = 544,
                       .largest_request = 34,
                       .largest = {1},
                       .most_blocks = 128 * 34,
                       .most_prompt_rows = 128 * 512};
  const RunDevice device_{.cap = kGiB * 24, .overhead = kGiB};
  std::shared_ptr<const Profile> profile_;  // of policies that are given one
};

TEST_F(Arranged, TheHostKeepsAllWeightsWhereRequestsFindTheirBlocks) {
  const MemoryPlan made = with("act-only", kGiB * 110, device_);
  EXPECT_EQ(made.released_layers, 0);
  EXPECT_GE(made.host.all_act_blocks(), demand_.most_blocks);
}

TEST_F(Arranged, WhereBlocksAreShortResidentWeightsGiveUpTheirPlace) {
  const Bytes short_of = weights_ + kGiB * 8;
  const MemoryPlan made = with("act-only", short_of, device_);
  EXPECT_GT(made.released_layers, 0);
  EXPECT_EQ(made.released_layers, made.device.resident_layers) << "the same layers";
  const Bytes kept = weights_ - layout_.layer.bytes * made.released_layers;
  EXPECT_LE(pool(made) + kept, short_of);
  EXPECT_GT(pool(made), kGiB * 8) << "more than fits beside all weights";
  EXPECT_LE(plan_device_memory(shape_, DType::float16, made.device, made.overhead).total,
            device_.cap);
}

// Beside all weights, some blocks would have to lie on the device in place of layers, and prompts would
// stream those, too.
TEST_F(Arranged, OptimalGivesUpCopiesRatherThanLayersWhereNotAllBlocksFitBesideAllWeights) {
  profile_ =
      std::make_shared<Profile>(profile_of(machine_named("h200-pcie5"), shape_, DType::float16));
  const MemoryPlan ample = with("optimal", kGiB * 110, device_);
  EXPECT_EQ(ample.released_layers, 0);
  for (int blocks = 10; blocks < 30; blocks += 3) {
    const Bytes host_memory = weights_ + kGiB * blocks;
    const MemoryPlan made = with("optimal", host_memory, device_);
    const Bytes kept = weights_ - layout_.layer.bytes * made.released_layers;
    EXPECT_LE(pool(made) + kept, host_memory);
    EXPECT_EQ(made.device.resident_layers, ample.device.resident_layers) << blocks << " GiB";
  }
}

TEST_F(Arranged, NothingIsGainedForAPolicyThatWantsNoMoreBlocks) {
  EXPECT_EQ(with("row-by-row", weights_ + kGiB * 8, device_).released_layers, 0);
}

TEST_F(Arranged, ADeviceThatIsTheHostHoldsNothingTwice) {
  RunDevice host = device_;
  host.is_host = true;
  host.holds_blocks = false;
  EXPECT_EQ(with("kv-only", weights_ + kGiB * 40, host).released_layers, 0);
}

TEST_F(Arranged, LayersThatTheHostHasNoMoreStayWhereTheyAre) {
  const MemoryPlan made = with("act-only", kGiB * 60, device_, 7);
  EXPECT_EQ(made.device.resident_layers, 7);
  EXPECT_EQ(made.released_layers, 0) << "they are already";
  EXPECT_THROW(with("act-only", kGiB * 60, device_, 40), Failure) << "more than fit";
}

}  // namespace
}  // namespace poise
