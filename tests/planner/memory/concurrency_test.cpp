#include "planner/memory/concurrency.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "common/weight_layout.h"
#include "planner/forecast/simulate.h"
#include "planner/forecast/simulate_papers.h"

namespace poise {
namespace {

struct Job {
  const char* model;
  std::int32_t requests, prompt, answer;
};

std::shared_ptr<const Profile> profile_for(const ModelShape& shape) {
  return std::make_shared<const Profile>(
      profile_of(machine_named("h200-pcie5"), shape, DType::float16));
}

// At most `most` at a time, on an H200 capped at 24 GiB.
std::int32_t at_a_time(const char* policy_name, const Job& job, std::int32_t most,
                       std::int32_t least = 1) {
  const ModelShape shape = opt_shape(job.model);
  Machine machine = machine_named("h200-pcie5");
  machine.host = policy_named(policy_name).attends_on_host ? 150 : 0;
  const auto profile = std::make_shared<const Profile>(profile_of(machine, shape, DType::float16));
  const auto policy = make_policy(policy_name, {.profile = profile});
  PlanningProblem problem{.shape = shape,
                          .dtype = DType::float16,
                          .requests = {},
                          .batch = {.max_num_seqs = most, .min_num_seqs = least},
                          .budget = {.weights = weight_layout(shape, DType::float16).total(),
                                     .available = kGiB * 100,
                                     .host_memory = {}},
                          .device = {.cap = kGiB * 24, .overhead = kGiB, .attends_on_host = true},
                          .profile = profile};
  for (std::int32_t i = 0; i < job.requests; ++i) {
    problem.requests.push_back(
        {.id = {static_cast<std::uint32_t>(i + 1)}, .prompt = job.prompt, .answer = job.answer});
  }
  return choose_concurrency(*policy, problem).sequences;
}

TEST(Concurrency, FewWhereTheirContextStaysOnTheDeviceBesideAllWeights) {
  const Job job{"opt-6.7b", 1000, 256, 256};
  const std::int32_t n = at_a_time("optimal", job, 256);
  // 10 GiB hold the keys and values of about 40 of them.
  EXPECT_GE(n, 20);
  EXPECT_LE(n, 100);
  EXPECT_EQ(at_a_time("optimal", job, 16), 16) << "no more than a user allows";
  EXPECT_EQ(at_a_time("optimal", job, 256, 200), 256) << "no fewer either";
}

// Answers that may be long and end early leave room for more than those that use it all.
TEST(Concurrency, MoreWhereAnswersMayEndEarly) {
  const std::int32_t sure = at_a_time("optimal", {"opt-6.7b", 1000, 1000, 8}, 256);
  const std::int32_t unsure = at_a_time("optimal", {"opt-6.7b", 1000, 8, 1000}, 256);
  EXPECT_GT(unsure, sure) << "the same context at the end, most of it not there at the beginning";
}

// Where answers of a few tokens are done a little sooner by very few requests at a time, and long ones
// take two thirds more.
TEST(Concurrency, BothCasesCount) {
  const std::int32_t of_500 = at_a_time("optimal", {"opt-6.7b", 128, 500, 32}, 128);
  EXPECT_GE(of_500, 20);
  EXPECT_LE(of_500, 64);
  const std::int32_t of_100 = at_a_time("optimal", {"opt-6.7b", 512, 100, 32}, 256);
  EXPECT_GE(of_100, 100);
  EXPECT_LE(of_100, 200);
}

TEST(Concurrency, AllThatMayBeWhereWeightsAreStreamed) {
  EXPECT_EQ(at_a_time("optimal", {"opt-30b", 1000, 256, 256}, 256), 256);
}

TEST(Concurrency, IsTheUsersUnderAPolicyThatIsComparedWithOthers) {
  for (const PolicyEntry& policy : policies()) {
    if (policy.name != "optimal") {
      EXPECT_EQ(at_a_time(policy.name.data(), {"opt-6.7b", 1000, 256, 256}, 256), 256)
          << policy.name;
    }
  }
}

// All of the work, played to its end.
TEST(Concurrency, HasTheWorkDoneSooner) {
  const ModelShape shape = opt_shape("opt-6.7b");
  Profile profile = *profile_for(shape);
  profile.gpu_memory = kGiB * 24;
  const auto speed = [&](std::string_view policy) {
    return simulate(profile, policy, {.profile = std::make_shared<const Profile>(profile)},
                    {.shape = shape,
                     .requests = 192,
                     .prompt = 256,
                     .answer = 64,
                     .batch = {.max_num_seqs = 192},
                     .to_the_end = true})
        .tokens_per_second;
  };
  EXPECT_GT(speed("optimal"), 1.5 * speed("act-only"));
}

}  // namespace
}  // namespace poise
