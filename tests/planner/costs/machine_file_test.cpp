#include "planner/costs/machine_file.h"

#include <gtest/gtest.h>

#include <tuple>

#include "common/files/json.h"
#include "common/trouble.h"
#include "planner/forecast/simulate_papers.h"
#include "tests/support/model_files.h"
#include "tests/support/source_folder.h"

namespace poise::test {
namespace {

using Json = nlohmann::json;

class MachineFile : public testing::Test {
 protected:
  MachineDescription read(const Json& json) const {
    testing_support::write_file(path_, json.dump());
    return read_machine(path_);
  }
  std::string refusal(const Json& json) const {
    try {
      read(json);
    } catch (const Failure& failure) {
      return failure.what();
    }
    return "none";
  }

  const testing_support::TempDirectory folder_;
  const std::filesystem::path path_ = folder_.path() / "mine.json";
  const Json whole_{{"name", "mine"},         {"link_gbps", 12.5},     {"compute_tflops", 40},
                    {"memory_gbps", 450},     {"gpu_memory", "12GiB"}, {"host_memory", 64000000000},
                    {"gpu_overhead", "1.5GB"}};
};

TEST_F(MachineFile, HoldsTheConstantsOfAMachine) {
  EXPECT_EQ(read(whole_).machine, (Machine{.name = "mine",
                                           .link = 12.5,
                                           .back = 12.5,  // as to the device, unless it says more
                                           .compute = 40,
                                           .memory = 450,
                                           .gpu_memory = kGiB * 12,
                                           .host_memory = {64000000000},
                                           .kind = DeviceKind::cuda,
                                           .gpu_overhead = {1500000000}}));
}

TEST_F(MachineFile, CountsTheCoresOfACpu) {
  Json json = whole_;
  json.erase("compute_tflops");
  json.erase("gpu_overhead");
  json.update({{"device", "cpu"}, {"cores", 16}, {"gflops_per_core", 50}});
  const Machine machine = read(json).machine;
  EXPECT_EQ(machine.kind, DeviceKind::cpu);
  EXPECT_DOUBLE_EQ(machine.compute, 0.8);
  EXPECT_EQ(machine.gpu_overhead, Bytes{0});
}

TEST_F(MachineFile, LikeANamedMachineChangesWhatItSays) {
  Machine wanted = machine_named("h200-pcie5");
  wanted.name = "more memory";
  wanted.host_memory = kGiB * 1024;
  EXPECT_EQ(
      read({{"name", "more memory"}, {"like", "h200-pcie5"}, {"host_memory", "1TiB"}}).machine,
      wanted);
}

TEST_F(MachineFile, ThatIsWrongIsRefusedWithFileFieldAndRule) {
  const auto with = [&](const char* name, Json value) {
    Json json = whole_;
    json[name] = std::move(value);
    return json;
  };
  const auto without = [&](const char* name) {
    Json json = whole_;
    json.erase(name);
    return json;
  };
  const std::tuple<Json, std::string, std::string> cases[] = {
      {Json::array(), "", "object"},
      {without("name"), "name", "is missing"},
      {without("link_gbps"), "link_gbps", "is missing"},
      {without("compute_tflops"), "compute_tflops", "is missing"},
      {without("gpu_memory"), "gpu_memory", "is missing"},
      {with("link_gbps", 0), "link_gbps", "1e-06"},
      {with("memory_gbps", "fast"), "memory_gbps", "number"},
      {with("gpu_memory", "12 gigs"), "gpu_memory", "24GiB"},
      {with("gpu_memory", -1), "gpu_memory", "at least 1"},
      {with("device", "tpu"), "device", "cpu or cuda"},
      {with("like", "abacus"), "like", "rtx4090-pcie4"},
      {with("cores", 8), "cores", "gflops_per_core"},
      {with("gflops_per_core", 8), "cores", "is missing"},
      {with("link", 5), "link", "is no field of a machine"},
      {with("load_kv", Json::object()), "load_kv", "--profile"},
      {with("measured", Json::object()), "measured", "no profile"}};
  for (const auto& [json, field, rule] : cases) {
    const std::string said = refusal(json);
    EXPECT_NE(said.find(path_.string()), std::string::npos) << said;
    EXPECT_NE(said.find(field), std::string::npos) << said;
    EXPECT_NE(said.find(rule), std::string::npos) << said;
  }
  EXPECT_THROW(find_machine((folder_.path() / "none.json").string()), Failure);
}

// Costs of the profile's model are the profile; another model gets what its largest sizes reach.
TEST_F(MachineFile, ExportedFromAProfileGivesItBackAndConstantsForOtherModels) {
  const ModelShape shape = opt_shape("opt-6.7b"), other = opt_shape("opt-13b");
  Profile profile =
      read_profile(source_folder() / "tests" / "planner" / "profiles" / "h200_opt_6.7b.json");
  profile.model = model_fingerprint(shape, DType::float16);
  write_machine(path_, machine_of(profile, shape, DType::float16));
  EXPECT_EQ(costs_on(path_.string(), shape, DType::float16), profile);
  const Machine machine = read_machine(path_).machine, near = machine_named("h200-pcie5");
  EXPECT_NEAR(machine.link, near.link, 0.1 * near.link);
  EXPECT_NEAR(machine.back, near.back, 0.2 * near.back);
  EXPECT_NEAR(machine.compute, near.compute, 0.2 * near.compute);
  EXPECT_NEAR(machine.memory, near.memory, 0.3 * near.memory);
  EXPECT_EQ(costs_on(path_.string(), other, DType::float16),
            profile_of(machine, other, DType::float16));
  EXPECT_EQ(costs_on(path_.string(), shape, DType::float32),
            profile_of(machine, shape, DType::float32));
}

TEST_F(MachineFile, ExportedFromConstantsHasThemAgainWhateverItsContextIs) {
  const Machine& machine = machine_named("h200-pcie5");
  const ModelShape shape = opt_shape("opt-6.7b");
  for (const KvFormat format : kKvFormats) {
    const Machine again = machine_of(profile_of(machine, shape, DType::float16, format), shape,
                                     DType::float16, format)
                              .machine;
    EXPECT_NEAR(again.link, machine.link, 1e-6 * machine.link);
    EXPECT_NEAR(again.memory, machine.memory, 1e-6 * machine.memory);
  }
}

}  // namespace
}  // namespace poise::test
