#include "planner/forecast/simulate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <tuple>
#include <vector>

#include "common/trouble.h"
#include "common/weight_layout.h"
#include "planner/forecast/simulate_papers.h"
#include "planner/memory/sizes.h"
#include "planner/virtual_time/rehearsal.h"

namespace poise {
namespace {

SimulatedRun run(std::string_view policy, const Machine& machine, const SimulatedWork& work) {
  const auto profile = std::make_shared<const Profile>(profile_of(machine, work.shape, work.dtype));
  // Without costs to go by, act-only makes all keys and values again.
  return simulate(*profile, policy, {.profile = policy == "act-only" ? nullptr : profile}, work);
}

SimulatedWork small_work() {
  return {.shape = opt_shape("opt-6.7b"), .requests = 32, .prompt = 1000, .answer = 24};
}

// From the last prompt's end on, contexts are 1,000 to 1,022 tokens long.
TEST(Simulation, TakesTheLinksTimeWhereTheLinkIsTheLimit) {
  Machine machine = machine_named("rtx4090-pcie4");
  machine.compute = 1e6;
  machine.memory = 1e6;
  const SimulatedRun kv = run("kv-only", machine, small_work());
  const double here = 16.0 * kv.host.gpu_kv_blocks / 32;  // tokens of each that stay on the device
  const double bytes = (1010.0 - here) * 4 * 4096 * 32;   // of a request's other keys and values
  EXPECT_NEAR(kv.tokens_per_second, 22e9 / bytes, 0.02 * 22e9 / bytes);
  EXPECT_GT(kv.link_busy, 0.99);
}

TEST(Simulation, TakesTheComputationsTimeWhereThatIsTheLimit) {
  Machine machine = machine_named("rtx4090-pcie4");
  machine.link = 1e6;
  machine.memory = 1e6;
  const SimulatedRun act = run("act-only", machine, small_work());
  const double operations = 1016.0 * 4 * 4096 * 4096 * 32 + 2 * 6.65e9;  // whole blocks; a token
  const double expected = machine.compute * 1e12 / operations;
  EXPECT_NEAR(act.tokens_per_second, expected, 0.02 * expected);
  EXPECT_GT(act.compute_busy, 0.99);
}

TEST(Simulation, NeverDoesTwoThingsAtOnceOnOneStream) {
  for (const PolicyEntry& policy : policies()) {
    for (Machine machine : machines()) {
      machine.host = 100;
      const SimulatedRun any = run(policy.name, machine, small_work());
      EXPECT_LE(any.host_busy, 1 + 1e-9) << policy.name << machine.name;
      EXPECT_LE(any.link_busy, 1 + 1e-9) << policy.name << machine.name;
      EXPECT_LE(any.compute_busy, 1 + 1e-9) << policy.name << machine.name;
      EXPECT_GT(any.tokens_per_second, 0);
    }
  }
}

// With all context attended on host cores that are slow, these are the limit: two bytes of each of K and V,
// 1,010 tokens of 4,096 numbers in 32 layers.
TEST(Simulation, TakesTheHostCoresTimeWhereTheyAreTheLimit) {
  Machine machine = machine_named("rtx4090-pcie4");
  machine.host = 30;
  machine.compute = machine.memory = 1e6;
  const SimulatedRun host = run("host-kv", machine, small_work());
  EXPECT_EQ(host.host.gpu_kv_blocks, 0u);
  EXPECT_EQ(host.loaded.kv, 0);
  const double expected = 30e9 / (1010.0 * 4 * 4096 * 32);
  EXPECT_NEAR(host.tokens_per_second, expected, 0.03 * expected);
  EXPECT_GT(host.host_busy, 0.97);
  machine = machine_named("rtx4090-pcie4");
  machine.host = 150;
  EXPECT_GT(run("host-kv", machine, small_work()).tokens_per_second,
            2 * run("kv-only", machine, small_work()).tokens_per_second);
}

// More requests at a time can be worth more than an iteration in balance, where the others would have
// to wait: all in ACT blocks there is room for every request at once.
TEST(Simulation, OptimalForeseesWhoWaitsForBlocks) {
  const std::vector<std::tuple<int, int, int>> works{{250, 256, 64}, {128, 512, 128}};
  for (const auto& [requests, prompt, answer] : works) {
    const SimulatedWork work{.shape = opt_shape("opt-30b"),
                             .requests = requests,
                             .prompt = prompt,
                             .answer = answer,
                             .to_the_end = true};
    Profile machine = profile_of(machine_named("rtx4090-pcie4"), work.shape, work.dtype);
    machine.host_memory = kGiB * 90;
    const auto shared = std::make_shared<const Profile>(machine);
    const auto speed = [&](std::string_view policy) {
      return simulate(machine, policy, {.profile = shared}, work).whole_tokens_per_second;
    };
    const double act_only = speed("act-only");
    EXPECT_GT(act_only, 1.05 * speed("hybrid")) << "this is such a case";
    EXPECT_GE(speed("optimal"), 0.98 * act_only);
  }
}

TEST(Simulation, PaysBetweenIterationsAndWhereStreamsWaitForOneAnother) {
  const SimulatedWork work{.shape = opt_shape("opt-1.3b"),
                           .requests = 8,
                           .prompt = 1000,
                           .answer = 9,
                           .to_the_end = true};
  Profile machine = profile_of(machine_named("rtx4090-pcie4"), work.shape, work.dtype);
  machine.gpu_memory = kGiB * 4;  // context crosses the link
  std::int64_t iterations = 0;
  const auto seconds = [&](const Profile& profile) {
    const SimulatedRun run = simulate(profile, "kv-only", {}, work);
    iterations = run.iterations;
    return work.requests * work.answer / run.whole_tokens_per_second;
  };
  const double before = seconds(machine);
  Profile late = machine;
  late.between = {1e-3};
  EXPECT_NEAR(seconds(late) - before, 1e-3 * static_cast<double>(iterations - 1), 1e-6);
  late.tables = {.a = 1e-3};
  late.results = {.b = 1e-6};  // 8 requests' samples
  EXPECT_NEAR(seconds(late) - before,
              (1e-3 * static_cast<double>(iterations - 1)) +
                  1e-3 * static_cast<double>(iterations) + 1e-6 * work.requests * work.answer,
              1e-3)
      << "but for the first tables, behind which weights come";
  // KV blocks wait for no other work and load while the layer before computes: only computation waits.
  Profile waiting = machine;
  waiting.event_latency = {1e-4};
  const double layers = work.shape.num_hidden_layers;
  const double least = 1e-4 * static_cast<double>(iterations), more = seconds(waiting) - before;
  EXPECT_GT(more, least);
  EXPECT_LT(more, 4 * layers * least);
}

// Where requests wait for blocks, too: 40 of 9 blocks each, 90 to 200 blocks.
TEST(Rehearsal, OfAllTheWorkTakesAsLongAsTheWork) {
  for (const char* name : {"kv-only", "act-only", "hybrid-static"}) {
    for (const std::int64_t mib : {800, 1200, 3000}) {
      SCOPED_TRACE(testing::Message() << name << ", " << mib << " MiB");
      const SimulatedWork work{.shape = opt_shape("opt-1.3b"),
                               .requests = 40,
                               .prompt = 64,
                               .answer = 81,
                               .to_the_end = true};
      Profile machine = profile_of(machine_named("rtx4090-pcie4"), work.shape, work.dtype);
      const WeightLayout layout = weight_layout(work.shape, work.dtype);
      machine.gpu_memory = kGiB * 3;
      machine.host_memory = layout.total() + kGiB * 2 + Bytes{mib << 20};
      const SimulatedRun run = simulate(machine, name, {}, work);
      const auto policy = make_policy(name, {});
      const auto rehearsed = rehearse_job(machine, *policy, layout,
                                          {.host = run.host,
                                           .device = run.device,
                                           .pack = pack_limits(work.batch, run.device),
                                           .requests = work.requests,
                                           .sequences = work.requests,
                                           .most_blocks = work.requests * 9,
                                           .prompt_rows = work.requests * work.prompt,
                                           .prefill_rows = run.device.max_rows - work.requests});
      ASSERT_TRUE(rehearsed);
      const double whole = work.requests * work.answer / run.whole_tokens_per_second;
      EXPECT_NEAR(rehearsed->n, whole, 0.02 * whole);
    }
  }
}

// tests/e2e/simulations.py compares figures with the papers'. These two experiments are short enough for sanitizers.
TEST(Simulation, PlaysPapersExperiments) {
  for (const char* name : {"capture-figure1", "capture-figure9"}) {
    const auto json = simulation_named(name).run({});
    EXPECT_FALSE(json["rows"].empty()) << name;
    EXPECT_FALSE(json["notes"].empty()) << name << " says what it assumes";
  }
}

TEST(Simulation, OfAModelThatDoesNotFitFails) {
  SimulatedWork work = small_work();
  work.shape = opt_shape("opt-175b");
  EXPECT_THROW(run("hybrid", machine_named("l4-pcie4"), work), Failure);
}

}  // namespace
}  // namespace poise
