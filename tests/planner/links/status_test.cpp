#include "planner/links/status.h"

#include <gtest/gtest.h>

#include "common/files/json.h"
#include "tests/support/model_files.h"

namespace poise {
namespace {

using nlohmann::json;

TEST(Status, SaysRatesAndShares) {
  RunStatus status;
  status.state = "running";
  status.requests = 100;
  status.done = 40;
  status.errors = 3;
  status.generated_tokens = 500;
  status.tokens_left = 1000;
  status.elapsed = {10};
  status.planning_time = {0.05};
  status.executor.compute_busy_ns = 9'000'000'000;
  status.executor.kv = 77;
  const json read = json::parse(to_json(status));
  EXPECT_EQ(read["requests"], 100);
  EXPECT_EQ(read["done"], 40);
  EXPECT_EQ(read["errors"], 3);
  EXPECT_EQ(read["tokens_per_second"], 50);
  EXPECT_EQ(read["seconds_left"], 20);
  EXPECT_EQ(read["busy"]["compute"], 0.9);
  EXPECT_EQ(read["planner"]["planning_share"], 0.005);
  EXPECT_EQ(read["link_bytes"]["kv"], 77);
}

TEST(Status, KeepsTheAnswersToTheLastWishesOfPolicies) {
  RunStatus status;
  EXPECT_TRUE(json::parse(to_json(status))["policy_answers"].empty());
  for (std::uint64_t serial = 1; serial <= 20; ++serial) {
    const bool refused = serial % 2 == 0;
    status.policy = refused ? status.policy : "hybrid";
    status.policy_since = refused ? status.policy_since : 10 * serial;
    status.policy_serial = serial;
    status.policy_refusal = refused ? "it is too large" : "";
    status.policy_held_back = refused ? "" : "fewer at a time";
    status.answer_wish();
  }
  const json answers = json::parse(to_json(status))["policy_answers"];
  ASSERT_EQ(answers.size(), 16u);
  EXPECT_EQ(answers.front()["serial"], 5);
  EXPECT_EQ(answers[14], json({{"serial", 19},
                               {"policy", "hybrid"},
                               {"since", 190},
                               {"refusal", ""},
                               {"held_back", "fewer at a time"}}));
  EXPECT_EQ(answers[15]["refusal"], "it is too large");
  EXPECT_EQ(answers[15]["since"], 190);
}

TEST(Status, BeforeAnythingRanHasNoRate) {
  const json read = json::parse(to_json(RunStatus{}));
  EXPECT_EQ(read["tokens_per_second"], 0);
  EXPECT_FALSE(read.contains("seconds_left"));
}

TEST(StatusFiles, AreReplacedAtMostTwiceASecond) {
  const testing_support::TempDirectory folder;
  StatusFile file(folder.path());
  const auto done = [&] {
    return json::parse(testing_support::read_file(folder.path() / "status.json"))["done"];
  };
  RunStatus status;
  status.done = 1;
  file.write(status, {100});
  status.done = 2;
  file.write(status, {100.4});
  EXPECT_EQ(done(), 1);
  file.write(status, {100.5});
  EXPECT_EQ(done(), 2);
  status.done = 3;
  file.write(status, {100.6}, true);
  EXPECT_EQ(done(), 3);
  EXPECT_FALSE(std::filesystem::exists(folder.path() / "status.json.new"));
}

TEST(StatusFiles, ThatCannotBeReplacedLeaveNothingBesideThem) {
  const testing_support::TempDirectory folder;
  std::filesystem::create_directories(folder.path() / "status.json" / "in the way");
  StatusFile file(folder.path());
  file.write(RunStatus{}, {1});
  EXPECT_FALSE(std::filesystem::exists(folder.path() / "status.json.new"));
}

TEST(StatusFiles, ThatCannotBeWrittenAreNoTrouble) {
  StatusFile file("/nonexistent/directory");
  EXPECT_NO_THROW(file.write(RunStatus{}, {1}));
}

}  // namespace
}  // namespace poise
