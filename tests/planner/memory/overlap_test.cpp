#include "planner/memory/overlap.h"

#include <gtest/gtest.h>

#include <memory>

#include "common/weight_layout.h"
#include "planner/forecast/simulate.h"
#include "planner/forecast/simulate_papers.h"

namespace poise {
namespace {

struct WholeJob {
  const char* model;
  const char* policy;
  std::int32_t requests, at_a_time, prompt, answer;
};

// On an H200 capped at 24 GiB, with 110 GiB of host memory.
SimulatedRun run_of(const WholeJob& job, BatchOptions batch, bool overlapped) {
  const SimulatedWork work{.shape = opt_shape(job.model),
                           .requests = job.requests,
                           .prompt = job.prompt,
                           .answer = job.answer,
                           .batch = batch,
                           .overlapped = overlapped,
                           .to_the_end = true};
  Profile profile = profile_of(machine_named("h200-pcie5"), work.shape, work.dtype);
  profile.gpu_memory = kGiB * 24;
  profile.host_memory = kGiB * 110;
  const auto shared = std::make_shared<const Profile>(profile);
  return simulate(*shared, job.policy, {.profile = shared}, work);
}

BatchOptions batch_of(const WholeJob& job) {
  return {.max_num_seqs = job.at_a_time, .min_num_seqs = job.at_a_time};
}

double speed(const SimulatedRun& run) { return run.whole_tokens_per_second; }

TEST(Overlap, FewRowsOfPromptsRunWhereAnswersOfOthersHideThem) {
  for (const WholeJob& job : {WholeJob{"opt-6.7b", "kv-only", 256, 64, 1024, 16},
                         WholeJob{"opt-6.7b", "hybrid", 256, 64, 1024, 16}}) {
    SCOPED_TRACE(job.policy);
    const SimulatedRun overlapped = run_of(job, batch_of(job), true);
    EXPECT_LE(overlapped.prompt_rows, 4096);
    EXPECT_GT(speed(overlapped), 1.02 * speed(run_of(job, batch_of(job), false)));
    const SimulatedPhase whole = overlapped.prompts + overlapped.both + overlapped.answers;
    EXPECT_GT(std::max(whole.link, whole.compute) / whole.time, 0.96);
  }
}

TEST(Overlap, AllPromptsRunAtOnceWhereAllRequestsBeginTogether) {
  const WholeJob job{"opt-6.7b", "kv-only", 64, 64, 1024, 16};
  EXPECT_EQ(run_of(job, batch_of(job), true).prompt_rows, BatchOptions{}.prefill_tokens);
}

// Each iteration brings three quarters of OPT-30B's weights, so it should serve as many requests as it can.
TEST(Overlap, ManyRowsRunWhereEachIterationStreamsTheModel) {
  const WholeJob job{"opt-30b", "kv-only", 192, 64, 512, 8};
  const SimulatedRun run = run_of(job, batch_of(job), true);
  EXPECT_GE(run.prompt_rows, 4096);
  EXPECT_GE(speed(run), speed(run_of(job, batch_of(job), false)));
}

// All begin together, so fewer rows gain nothing; the link goes on while a layer's products run.
TEST(Overlap, AThirdSideIsTakenWhereTheLinkWouldStandStill) {
  const WholeJob job{"opt-13b", "act-only", 64, 64, 512, 16};
  const SimulatedRun overlapped = run_of(job, batch_of(job), true);
  EXPECT_EQ(overlapped.device.sides, 3);
  EXPECT_GT(speed(overlapped), 1.01 * speed(run_of(job, batch_of(job), false)));
}

TEST(Overlap, TheUserMaySayHowManyRowsRun) {
  const WholeJob job{"opt-6.7b", "kv-only", 64, 32, 512, 8};
  BatchOptions batch = batch_of(job);
  batch.prompt_rows = 700;
  EXPECT_EQ(run_of(job, batch, true).prompt_rows, 700);
}

}  // namespace
}  // namespace poise
