#include "planner/cost_model.h"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>

#include "common/trouble.h"
#include "tests/support/model_files.h"

namespace poise {
namespace {

using testing_support::TempDirectory;

ModelShape shape_of(std::int32_t kv_heads) {
  return {.num_hidden_layers = 32,
          .hidden_size = 4096,
          .ffn_dim = 16384,
          .num_attention_heads = 32,
          .num_key_value_heads = kv_heads,
          .head_dim = 128,
          .vocab_size = 50272,
          .max_position_embeddings = 2048,
          .position_offset = 2,
          .word_embed_proj_dim = 4096,
          .do_layer_norm_before = 1,
          .enable_bias = 1,
          .layer_norm_elementwise_affine = 1,
          .has_final_layer_norm = 1,
          .tie_word_embeddings = 1};
}

TEST(Line, ThroughPointsOnOneIsFoundAgain) {
  const Point points[] = {{1, {5}}, {2, {7}}, {10, {23}}};
  const Line line = fit_line(points);
  EXPECT_NEAR(line.a, 3, 1e-12);
  EXPECT_NEAR(line.b, 2, 1e-12);
  EXPECT_NEAR(line.r2, 1, 1e-12);
  EXPECT_NEAR(line.find({23}), 10, 1e-12);
  EXPECT_EQ(line.find({1}), 0);
  EXPECT_EQ(line(0).n, 0);
}

TEST(Line, BesideNoOtherLineIsNearerToScatteredPoints) {
  std::mt19937 random(7);
  std::uniform_real_distribution<double> noise(-1, 1);
  std::vector<Point> points;
  for (int n = 1; n <= 30; ++n) {
    points.push_back({static_cast<double>(n), {40 + 3 * n + 5 * noise(random)}});
  }
  const auto distance = [&](double a, double b) {
    double sum = 0;
    for (const Point& point : points) {
      sum += std::pow(point.time.n - a - b * point.n, 2);
    }
    return sum;
  };
  const Line line = fit_line(points);
  for (const double da : {-0.1, 0.0, 0.1}) {
    for (const double db : {-0.01, 0.0, 0.01}) {
      EXPECT_LE(distance(line.a, line.b), distance(line.a + da, line.b + db) + 1e-9);
    }
  }
  EXPECT_GT(line.r2, 0.95);
  EXPECT_LT(line.r2, 1);
}

TEST(Line, BeginsAtNothingWhereItWouldBeginBelow) {
  const Point below[] = {{10, {5}}, {20, {30}}};
  EXPECT_EQ(fit_line(below).a, 0);
  EXPECT_NEAR(fit_line(below).b, (10 * 5 + 20 * 30) / 500.0, 1e-12);
  const Point one[] = {{4, {8}}, {4, {8}}};
  EXPECT_NEAR(fit_line(one).b, 2, 1e-12);
  EXPECT_EQ(fit_line(one).a, 0);
}

TEST(Line, ThatWouldFallIsLevel) {
  const Point falling[] = {{1, {5}}, {10, {4}}, {20, {3}}};
  const Line line = fit_line(falling);
  EXPECT_NEAR(line.a, 4, 1e-9);
  EXPECT_GT(line.b, 0);
  EXPECT_NEAR(line(20).n, 4, 1e-5);
}

// The figures of the design: h = 7168 on the H200 takes 0.52 µs a token for KV and 0.26 for ACT.
TEST(Machines, CostWhatTheirConstantsSay) {
  const Machine& machine = machine_named("rtx4090-pcie4");
  const Profile p = profile_of(machine, shape_of(32), DType::float16);
  EXPECT_NEAR(p.load_kv(1).n, 16 * 16384 / 22e9, 1e-15);
  EXPECT_NEAR(p.load_act(1).n, 16 * 8192 / 22e9, 1e-15);
  EXPECT_NEAR(p.kv_gen(10).n, 160 * 4.0 * 4096 * 4096 / (machine.compute * 1e12), 1e-12);
  EXPECT_NEAR(p.load_w(1).n, 12.0 * 4096 * 4096 * 2 / 22e9, 1e-4);
  EXPECT_EQ(p.gpu_memory, kGiB * 24);
}

TEST(Machines, CountGroupedQueries) {
  const Machine& machine = machine_named("h200-pcie5");
  const Profile many = profile_of(machine, shape_of(32), DType::float16);
  const Profile grouped = profile_of(machine, shape_of(8), DType::float16);
  EXPECT_NEAR(grouped.load_kv.b, many.load_kv.b / 4, 1e-15);
  EXPECT_NEAR(grouped.kv_gen.b, many.kv_gen.b / 4, 1e-15);
  EXPECT_EQ(grouped.load_act.b, many.load_act.b);
  EXPECT_GT(grouped.load_act.b, grouped.load_kv.b);
}

TEST(Machines, AreKnownByName) {
  for (const Machine& machine : machines()) {
    EXPECT_EQ(&machine_named(machine.name), &machine);
  }
  EXPECT_THROW(machine_named("abacus"), Failure);
}

TEST(ProfileFile, IsReadAsItWasWritten) {
  const TempDirectory folder;
  Profile profile = profile_of(machine_named("l4-pcie4"), shape_of(8), DType::bfloat16);
  profile.load_kv.r2 = 0.9934;
  profile.between = {0.003};
  profile.measured = {{.name = "load_kv",
                       .points = {{1, {0.5}}, {8, {1.25}}},
                       .alone = {{1, {0.25}}},
                       .alone_line = {.a = 0.125, .b = 0.5, .r2 = 0.5},
                       .remeasured = 2}};
  const auto path = folder.path() / "profile.json";
  write_profile(path, profile);
  EXPECT_EQ(read_profile(path, profile.fingerprint), profile);
}

TEST(ProfileFile, HoldsForOneMachineAndModel) {
  const TempDirectory folder;
  const auto path = folder.path() / "profile.json";
  EXPECT_EQ(read_profile(path, "x"), std::nullopt);
  const Profile profile = profile_of(machine_named("l4-pcie4"), shape_of(8), DType::float16);
  write_profile(path, profile);
  for (const auto& other : {profile_fingerprint("l4-pcie4", shape_of(4), DType::float16),
                            profile_fingerprint("l4-pcie4", shape_of(8), DType::bfloat16),
                            profile_fingerprint("a100-pcie4", shape_of(8), DType::float16)}) {
    EXPECT_EQ(read_profile(path, other), std::nullopt);
  }
}

TEST(ProfileFile, OfAnotherModelIsRefusedWhereItWasNamed) {
  const TempDirectory folder;
  const auto path = folder.path() / "profile.json";
  const Profile profile = profile_of(machine_named("l4-pcie4"), shape_of(8), DType::float16);
  write_profile(path, profile);
  EXPECT_EQ(read_profile_of(path, shape_of(8), DType::float16), profile);
  EXPECT_THROW(read_profile_of(path, shape_of(4), DType::float16), Failure);
}

TEST(ProfileFile, ThatIsBrokenIsNamedWithItsField) {
  const TempDirectory folder;
  const auto path = folder.path() / "profile.json";
  write_profile(path, profile_of(machine_named("l4-pcie4"), shape_of(8), DType::float16));
  const nlohmann::ordered_json whole = nlohmann::ordered_json::parse(std::ifstream(path));
  const auto sentence = [&](const nlohmann::ordered_json& json) -> std::string {
    testing_support::write_file(path, json.dump());
    try {
      read_profile(path);
    } catch (const Failure& failure) {
      return failure.what();
    }
    return "";
  };
  for (const ProfileLine& line : profile_lines()) {
    auto broken = whole;
    broken.erase(line.name);
    EXPECT_NE(sentence(broken).find(line.name), std::string::npos) << sentence(broken);
    EXPECT_NE(sentence(broken).find(path.string()), std::string::npos);
    broken = whole;
    broken[line.name]["b"] = -1;
    EXPECT_NE(sentence(broken).find("b"), std::string::npos);
  }
}

TEST(ProfileFile, ThatIsNoneIsRefused) {
  const TempDirectory folder;
  const auto path = folder.path() / "profile.json";
  for (const char* text : {"", "[]", "{\"gpu_memory\": 1}", "{\"gpu_memory\": \"1\"}"}) {
    testing_support::write_file(path, text);
    EXPECT_THROW(read_profile(path, "x"), Failure) << text;
  }
}

}  // namespace
}  // namespace poise
