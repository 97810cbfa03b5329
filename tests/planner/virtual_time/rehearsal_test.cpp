#include "planner/virtual_time/rehearsal.h"

#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <vector>

#include "planner/schedule/iteration.h"
#include "planner/schedule/schedule.h"
#include "planner/virtual_time/virtual_executor.h"
#include "tests/support/small_shape.h"

namespace poise {
namespace {

constexpr std::int32_t kRehearsedLayers = 4;

// A block takes a second over the link, a prompt's row a tenth of one.
Profile blocks_of_a_second() {
  Profile profile;
  profile.load_kv.b = 1;
  profile.forward.b = 0.1;
  return profile;
}

class RehearsalTest : public ::testing::Test {
 protected:
  Rehearsal rehearsal() const {
    std::int64_t blocks = 0, prompts = 0;
    for (const RequestSize& one : each_) {
      blocks += blocks_for(one.most_context());
      prompts += one.prompt;
    }
    const auto count = static_cast<std::int32_t>(each_.size());
    return {
        .host = {.kv_blocks = static_cast<std::uint32_t>(blocks)},
        .device = {.resident_layers = kRehearsedLayers,
                   .max_rows = 1024,
                   .max_mini_batch_rows = 1024,
                   .max_sequences = count,
                   .kv_slots = 256,
                   .logits_rows = count,
                   .max_context = 1024},
        .pack = {.act_slots = 1, .kv_slots = 256, .tokens = 4096, .rows = 1024, .sequences = count},
        .requests = count,
        .each = std::make_shared<const std::vector<RequestSize>>(each_),
        .sequences = count,
        .most_blocks = blocks,
        .prompt_rows = prompts,
        .prefill_rows = 1024};
  }

  double rehearsed(const Rehearsal& job) const {
    const auto time = rehearse_job(profile_, *policy_, layout_, job);
    return time ? time->n : NAN;
  }

  // As a run does it: no iteration stands for another.
  double played(const Rehearsal& job) const {
    std::vector<Request> requests;
    for (const RequestSize& one : each_) {
      Request& request = requests.emplace_back();
      request.id = {static_cast<std::uint32_t>(requests.size())};
      request.prompt = std::vector<TokenId>(static_cast<std::size_t>(one.prompt));
      request.sampling.max_tokens = one.answer;
    }
    Scheduler scheduler(
        *policy_, job.host,
        {.max_num_seqs = job.sequences, .prefill_rows = job.prefill_rows, .sequence_rows = 1024});
    for (const Request& request : requests) {
      scheduler.add(request);
    }
    OrderTables tables(job.host, {}, false);
    VirtualExecutor executor(profile_, layout_, job.device);
    std::uint64_t number = 0;
    while (!scheduler.idle()) {
      const auto chunks = scheduler.next();
      executor.run(plan_iteration({.policy = *policy_, .host = job.host, .limits = job.pack},
                                  chunks, tables, {.number = ++number}),
                   scheduler.last_iteration());
      scheduler.complete(any_outcomes(chunks));
    }
    return executor.now().n;
  }

  const Profile profile_ = blocks_of_a_second();
  const std::unique_ptr<Policy> policy_ = make_policy("kv-only", {});
  const WeightLayout layout_ =
      weight_layout(testing_support::small_shape(kRehearsedLayers), DType::float16);
  std::vector<RequestSize> each_;  // prompt, answer
};

TEST_F(RehearsalTest, AJobOfDifferentRequestsTakesAsLongAsItsRun) {
  // Long requests answer little, short ones much.
  for (int i = 0; i < 4; ++i) {
    each_.push_back({.id = {1}, .prompt = 320 + 16 * i, .answer = 4});
    each_.push_back({.id = {1}, .prompt = 8 + i, .answer = 60});
  }
  Rehearsal job = rehearsal();
  const double of_run = played(job);
  EXPECT_NEAR(rehearsed(job), of_run, 0.03 * of_run);
  job.each = nullptr;
  EXPECT_GT(std::abs(rehearsed(job) - of_run), 0.2 * of_run)
      << "requests of average length are another job";
}

TEST_F(RehearsalTest, OnlySoManyRequestsAsWantedAreRehearsed) {
  each_ = {{.id = {1}, .prompt = 100, .answer = 4}, {.id = {2}, .prompt = 10, .answer = 40}};
  Rehearsal job = rehearsal();
  const double both = rehearsed(job);
  job.requests = job.sequences = 1;
  EXPECT_LT(rehearsed(job), 0.9 * both);
}

TEST_F(RehearsalTest, AJobOfTooManyIterationsIsNotRehearsed) {
  each_ = {{.id = {1}, .prompt = 10, .answer = static_cast<std::int32_t>(kRehearsedIterations) + 1},
           {.id = {2}, .prompt = 10, .answer = static_cast<std::int32_t>(kRehearsedIterations)}};
  Rehearsal job = rehearsal();
  job.device.max_context = 4096;
  EXPECT_TRUE(std::isnan(rehearsed(job)));
}

}  // namespace
}  // namespace poise
