#include "planner/costs/costs.h"

#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <utility>

#include "common/channel.h"
#include "planner/costs/measuring_build.h"
#include "planner/policies/default_policy.h"
#include "tests/support/model_files.h"

namespace poise::test {
namespace {

constexpr bool kIsHost = true, kIsGpu = false;

TEST(DefaultPolicy, IsTheOneThatCostsDecideWhereADeviceComputesBesideTheLink) {
  EXPECT_EQ(policy_or_default(std::nullopt, kIsGpu, {}, {}), "optimal");
  EXPECT_EQ(policy_or_default(std::nullopt, kIsHost, {}, {}), "kv-only");
  EXPECT_EQ(policy_or_default(std::nullopt, kIsHost, {.machine = "a100-pcie4"}, {}), "optimal");
  EXPECT_EQ(policy_or_default(std::nullopt, kIsHost, {.profile = "profile.json"}, {}), "optimal");
}

TEST(DefaultPolicy, WithAShareIsOneThatTakesShares) {
  for (const bool device_is_host : {kIsHost, kIsGpu}) {
    EXPECT_EQ(policy_or_default(std::nullopt, device_is_host, {}, {.act_share = 0.5}), "hybrid");
  }
}

TEST(DefaultPolicy, IsNotAskedForWhereOneWasNamed) {
  EXPECT_EQ(policy_or_default("kvpr", kIsGpu, {}, {.act_share = 0.5}), "kvpr");
  EXPECT_EQ(policy_or_default("row-by-row", kIsHost, {}, {}), "row-by-row");
}

const ModelShape kShape{.num_hidden_layers = 2,
                        .hidden_size = 32,
                        .ffn_dim = 64,
                        .num_attention_heads = 2,
                        .num_key_value_heads = 2,
                        .head_dim = 16,
                        .vocab_size = 100,
                        .max_position_embeddings = 64,
                        .word_embed_proj_dim = 32};

class KeptProfiles : public testing::Test {
 protected:
  // Each one is newer than those before.
  void keep(const std::string& name, DeviceKind kind, const std::string& build) {
    Profile profile = profile_of(machine_named("l4-pcie4"), kShape, DType::float16);
    profile.name = name;
    profile.kind = kind;
    profile.build = build;
    const auto file = folder_.path() / (name + ".json");
    write_profile(file, profile);
    std::filesystem::last_write_time(file,
                                     std::filesystem::file_time_type(std::chrono::hours(++age_)));
  }
  std::string newest(std::optional<DeviceKind> device, std::optional<std::string> build) const {
    const auto found = newest_kept_profile(
        folder_.path(),
        {.shape = kShape, .dtype = DType::float16, .device = device, .build = std::move(build)});
    return found ? found->profile.name : "none";
  }

  const testing_support::TempDirectory folder_;
  int age_ = 0;
};

TEST_F(KeptProfiles, AreFoundByTheKindOfTheirDeviceWhateverItIsCalled) {
  keep("a GPU that is called cpu", DeviceKind::cuda, "b");
  keep("cores", DeviceKind::cpu, "b");
  EXPECT_EQ(newest(std::nullopt, "b"), "cores");
  EXPECT_EQ(newest(DeviceKind::cpu, "b"), "cores");
  EXPECT_EQ(newest(DeviceKind::cuda, "b"), "a GPU that is called cpu");
}

TEST_F(KeptProfiles, OfAnotherBuildAreFoundOnlyWhereAnyBuildWillDo) {
  keep("ours", DeviceKind::cpu, "this build");
  keep("newer", DeviceKind::cpu, "another build");
  keep("old", DeviceKind::cpu, "");
  EXPECT_EQ(newest(std::nullopt, "this build"), "ours");
  EXPECT_EQ(newest(std::nullopt, "a third build"), "none");
  EXPECT_EQ(newest(std::nullopt, std::nullopt), "old");
}

TEST(MeasuringBuild, NamesTheContractsTheWorkAndTheCompilation) {
  const std::string build = measuring_build();
  EXPECT_EQ(build.find(build_id() + ", work "), 0u) << build;
  EXPECT_GT(build.size(), (build_id() + ", work 12345678, ").size()) << build;
}

}  // namespace
}  // namespace poise::test
