// The papers' systems as plans: weights, context and batches where their authors have them.

#include "planner/memory/placement_options.h"

#include <gtest/gtest.h>

#include "common/trouble.h"
#include "common/weight_layout.h"
#include "planner/forecast/simulate_papers.h"
#include "planner/memory/planning_problem.h"
#include "tests/support/complaint.h"

namespace poise {
namespace {

using testing_support::complaint;

void expect_refusal(const char* percent, const char* fragment) {
  const std::string said = complaint([&] { parse_percent(percent); });
  EXPECT_NE(said.find(fragment), std::string::npos) << percent << ": " << said;
  EXPECT_NE(said.find("--percent"), std::string::npos) << said;
}

TEST(Percent, IsSixNumbersInThreePairs) {
  EXPECT_EQ(parse_percent("20,80,0,100,100,0"), (FlexGenPercent{20, 80, 0, 100, 100, 0}));
  EXPECT_EQ(parse_percent("12.5,87.5,100,0,100,0"), (FlexGenPercent{12.5, 87.5, 100, 0, 100, 0}));
  for (const char* wrong :
       {"", "20", "20,80,0,100,100", "20,80,0,100,100,0,0", "20,80,0,100,100,0,",
        "a,80,0,100,100,0", "-1,101,0,100,100,0", "nan,80,0,100,100,0", "20, 80,0,100,100,0",
        ",,,,,", "1e999,0,0,0,0,0"}) {
    expect_refusal(wrong, "six numbers from 0 to 100 are wanted, as in 20,80,0,100,100,0");
  }
}

TEST(Percent, LeavesNothingToADiskAndActivationsToTheDevice) {
  expect_refusal("20,60,0,100,100,0", "20 and 60 of the weights are not 100 together");
  expect_refusal("20,80,0,50,100,0",
                 "no disk is used: give the host what the device does not have");
  expect_refusal("20,80,0,100,0,100", "end it with 100,0");
}

TEST(PlacementOptions, SayEachThingOnce) {
  const FlexGenPercent some{20, 80, 0, 100, 100, 0};
  EXPECT_THROW(
      (PlacementOptions{.resident_layers = 3, .percent = some, .gpu_blocks = {}}.check_alone()),
      Failure);
  EXPECT_THROW(
      (PlacementOptions{.resident_layers = {}, .percent = some, .gpu_blocks = GpuBlocks::none}
           .check_alone()),
      Failure);
  EXPECT_NO_THROW(
      (PlacementOptions{.resident_layers = 3, .percent = {}, .gpu_blocks = GpuBlocks::none}
           .check_alone()));
}

// OPT-6.7B on an H200 capped at 24 GiB.
class PapersSystems : public testing::Test {
 protected:
  PapersSystems() {
    problem_.profile =
        std::make_shared<const Profile>(profile_of(machine_named("h200-pcie5"), shape_, dtype_));
    for (std::uint32_t i = 1; i <= 256; ++i) {
      problem_.requests.push_back({.id = {i}, .prompt = 512, .answer = 65});
    }
  }

  RunPlan plan(std::string_view policy, const PlacementOptions& placement,
               PolicyOptions options = {}) const {
    PlanningProblem problem = problem_;
    placement.add_to(problem.fixed.placement, shape_.num_hidden_layers,
                     problem.device.holds_blocks);
    if (policy_named(policy).attends_on_host) {
      Machine machine = machine_named("h200-pcie5");
      machine.host = 150;
      problem.profile = std::make_shared<const Profile>(profile_of(machine, shape_, dtype_));
    }
    options.profile = problem.profile;
    const RunPlan made = solve(*make_policy(policy, options), problem);
    EXPECT_LE(plan_device_memory(shape_, dtype_, made.device, made.overhead).total,
              problem.device.cap);
    EXPECT_EQ(made.device.gpu_act_blocks, static_cast<std::int32_t>(made.host.gpu_act_blocks));
    EXPECT_EQ(made.device.gpu_kv_blocks, static_cast<std::int32_t>(made.host.gpu_kv_blocks));
    return made;
  }
  static PlacementOptions resident(std::int32_t layers) {
    return {.resident_layers = layers, .percent = {}, .gpu_blocks = {}};
  }
  static PlacementOptions percent(const char* text) {
    return {.resident_layers = {}, .percent = parse_percent(text), .gpu_blocks = {}};
  }

  static constexpr std::int64_t kBlocks = 128 * 36;  // of those under way
  const ModelShape shape_ = opt_shape("opt-6.7b");
  const DType dtype_ = DType::float16;
  PlanningProblem problem_{.shape = shape_,
                           .dtype = dtype_,
                           .requests = {},
                           .batch = {.max_num_seqs = 128, .min_num_seqs = 128},
                           .budget = {.weights = weight_layout(shape_, dtype_).total(),
                                      .available = kGiB * 90,
                                      .host_memory = {}},
                           .device = {.cap = kGiB * 24, .overhead = kGiB, .attends_on_host = true}};
};

TEST_F(PapersSystems, KeepAsManyLayersOnTheDeviceAsTheUserSays) {
  for (const PolicyEntry& policy : policies()) {
    for (const std::int32_t layers : {0, 5, 32}) {
      const RunPlan made = plan(policy.name, resident(layers));
      EXPECT_EQ(made.device.resident_layers, layers) << policy.name;
      EXPECT_EQ(made.released_layers, 0) << "the host has them, too";
    }
  }
}

TEST_F(PapersSystems, AreRefusedWithTheRemedyWhereTheyDoNotFit) {
  const std::string more = complaint([&] { plan("kv-only", resident(33)); });
  EXPECT_NE(more.find("--resident-layers 33: the model has 32 layers"), std::string::npos) << more;
  problem_.device.cap = kGiB * 8;
  const std::string weights = complaint([&] { plan("kv-only", resident(32)); });
  EXPECT_NE(weights.find("--resident-layers"), std::string::npos) << weights;
  const std::string context = complaint([&] { plan("kv-only", percent("0,100,100,0,100,0")); });
  EXPECT_NE(context.find("--percent"), std::string::npos) << context;
  problem_.device.is_host = true;
  problem_.device.holds_blocks = false;
  const std::string host = complaint([&] { plan("kv-only", percent("0,100,10,90,100,0")); });
  EXPECT_NE(host.find("--gpu-memory"), std::string::npos) << host;
  EXPECT_NO_THROW(plan("kv-only", percent("0,100,0,100,100,0")));
}

TEST_F(PapersSystems, FlexGensHasItsSharesOnTheDevice) {
  for (const PolicyEntry& policy : policies()) {
    if (policy.name == "row-by-row") {
      continue;  // of as many blocks as one mini-batch has
    }
    SCOPED_TRACE(policy.name);
    const RunPlan made = plan(policy.name, percent("25,75,10,90,100,0"));
    EXPECT_EQ(made.device.resident_layers, 8);
    EXPECT_NEAR(made.host.gpu_act_blocks, 0.1 * static_cast<double>(made.host.all_act_blocks()), 1);
    EXPECT_NEAR(made.host.gpu_kv_blocks, 0.1 * static_cast<double>(made.host.all_kv_blocks()), 1);
    if (made.host.token_blocks == 0) {
      EXPECT_NEAR(made.blocks(), kBlocks, 1);
    }
  }
  const RunPlan none = plan("kv-only", percent("50,50,0,100,100,0"));
  EXPECT_EQ(none.host.gpu_kv_blocks, 0u);
  EXPECT_EQ(none.host.kv_blocks, kBlocks);
}

TEST_F(PapersSystems, CapturesHasActBlocksAloneOnTheDeviceAndStreamsAllWeights) {
  const PlacementOptions capture{.resident_layers = 0, .percent = {}, .gpu_blocks = GpuBlocks::act};
  for (const PolicyEntry& policy : policies()) {
    SCOPED_TRACE(policy.name);
    const RunPlan made = plan(policy.name, capture);
    EXPECT_EQ(made.device.resident_layers, 0);
    EXPECT_EQ(made.host.gpu_kv_blocks, 0u);
  }
  EXPECT_GT(plan("hybrid", capture).host.gpu_act_blocks, 0u);
  // Beside the ACT blocks of fewer requests there would be room for KV blocks, too.
  problem_.batch.max_num_seqs = problem_.batch.min_num_seqs = 40;
  EXPECT_GT(plan("hybrid", resident(0), {.act_share = 0.5}).host.gpu_kv_blocks, 0u);
  EXPECT_EQ(plan("hybrid", capture, {.act_share = 0.5}).host.gpu_kv_blocks, 0u);
}

// DeepSpeed-Inference takes "the batch size that avoids OOM" (CAPTURE, section V-A).
TEST_F(PapersSystems, DeepSpeedsBatchIsAsLargeAsTheDeviceHolds) {
  problem_.batch.by_profile = true;  // the user says nothing
  problem_.device.cap = kGiB * 4;
  const PlacementOptions streamed{
      .resident_layers = 0, .percent = {}, .gpu_blocks = GpuBlocks::none};
  const RunPlan made = plan("row-by-row", streamed);
  const std::int64_t requests = made.host.all_kv_blocks() / 36;
  EXPECT_GT(made.batch.mini_batch_tokens, 8192);
  EXPECT_EQ(made.batch.mini_batch_tokens, made.host.all_kv_blocks() * kBlockTokens);
  EXPECT_GE(made.device.kv_slots, made.host.all_kv_blocks()) << "one mini-batch holds them all";
  EXPECT_LT(requests, 128) << "else a smaller device is wanted here";
  // One request more does not fit.
  DeviceLimits larger = made.device;
  larger.kv_slots += 36;
  EXPECT_GT(plan_device_memory(shape_, dtype_, larger, made.overhead).total, problem_.device.cap);
  problem_.device.cap = kGiB * 24;
  EXPECT_EQ(plan("row-by-row", streamed).host.all_kv_blocks(), kBlocks) << "all of them";
  problem_.batch.by_profile = false;  // the user says 8,192
  EXPECT_EQ(plan("row-by-row", streamed).host.all_kv_blocks(), 512);
}

TEST_F(PapersSystems, KvprsLatencyScheduleHasWeightsOnTheDeviceAndContextOnTheHost) {
  const RunPlan made = plan("kvpr", {}, {.row_by_row = true});
  EXPECT_EQ(made.device.resident_layers, 32);
  EXPECT_EQ(made.host.gpu_act_blocks + made.host.gpu_kv_blocks, 0u);
  EXPECT_EQ(made.blocks(), 512);
  EXPECT_GT(made.host.act_blocks, 0u);
  EXPECT_GT(made.host.kv_blocks, 0u);
}

}  // namespace
}  // namespace poise
