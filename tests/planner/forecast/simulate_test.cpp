#include "planner/forecast/simulate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <tuple>
#include <vector>

#include "common/trouble.h"
#include "common/weight_layout.h"
#include "planner/forecast/simulate_grid.h"
#include "planner/forecast/simulate_papers.h"
#include "planner/forecast/simulate_table.h"
#include "planner/memory/sizes.h"
#include "planner/virtual_time/rehearsal.h"

namespace poise {
namespace {

// CAPTURE (ICCD 2025), Table III: tokens/s on an RTX 4090, 128 requests of 1,920 tokens.
constexpr struct {
  const char* model;
  double act_only, hybrid_static, hybrid;
} kTable3[] = {{"opt-6.7b", 25.06, 31.49, 31.53},
               {"opt-13b", 13.90, 18.61, 19.06},
               {"opt-30b", 6.28, 8.68, 10.10},
               {"opt-66b", 2.96, 4.12, 4.63}};

TEST(Simulation, GivesCapturesTable3FromOnePairOfConstants) {
  const auto rows = simulation_named("capture-table3").play()["rows"];
  ASSERT_EQ(rows.size(), std::size(kTable3));
  double squares = 0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    EXPECT_EQ(rows[i]["model"], kTable3[i].model);
    const std::pair<const char*, double> cells[] = {{"act-only", kTable3[i].act_only},
                                                    {"hybrid-static", kTable3[i].hybrid_static},
                                                    {"hybrid", kTable3[i].hybrid}};
    for (const auto& [policy, published] : cells) {
      const double off = rows[i][policy].get<double>() / published - 1;
      std::printf("%s %s: %.2f, published %.2f, %+.1f %%\n", kTable3[i].model, policy,
                  rows[i][policy].get<double>(), published, 100 * off);
      EXPECT_LT(std::abs(off), 0.15) << kTable3[i].model << ' ' << policy;
      squares += off * off;
    }
  }
  EXPECT_LT(std::sqrt(squares / 12), 0.065);
}

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
    for (const Machine& machine : machines()) {
      const SimulatedRun any = run(policy.name, machine, small_work());
      EXPECT_LE(any.link_busy, 1 + 1e-9) << policy.name << machine.name;
      EXPECT_LE(any.compute_busy, 1 + 1e-9) << policy.name << machine.name;
      EXPECT_GT(any.tokens_per_second, 0);
    }
  }
}

// The grid of models (with shared keys, too), machines, memories and lengths: a third of it, of every
// model, memory and length; `poise simulate policy-grid` shows all of it.
TEST(Simulation, OptimalIsTheBestPolicyOrNearlySo) {
  int with_room = 0, best = 0;
#ifdef NDEBUG
  const auto grid = policy_grid_thinned(3);
#else
  const auto grid = policy_grid_thinned(29);  // under sanitizers each row takes seconds
#endif
  for (const auto& row : grid["rows"]) {
    const double ratio = row["optimal_to_best"].get<double>();
    const bool room = row["room_for_all"].get<bool>();
    EXPECT_GE(ratio, 0.98) << row.dump();
    EXPECT_GE(row["optimal_so"].get<double>(), 0.99 * row["optimal"].get<double>()) << row.dump();
    with_room += room ? 1 : 0;
    best += ratio >= 1 ? 1 : 0;
  }
  const int rows = static_cast<int>(grid["rows"].size());
  EXPECT_GE(2 * with_room, rows);
  EXPECT_GE(2 * best, rows);
  const std::string table = to_table(grid);
  EXPECT_EQ(std::ranges::count(table, '\n'), 1 + rows + 2);
  EXPECT_NE(table.find(fmt::format("\n{} rows; optimal has at least", rows)), std::string::npos);
  EXPECT_NE(table.find(" of them it has fewer requests at a time: "), std::string::npos);
}

// More requests at a time can be worth more than an iteration in balance, where the others would have
// to wait: all in ACT blocks there is room for every request at once.
TEST(Simulation, OptimalForeseesWhoWaitsForBlocks) {
#ifdef NDEBUG
  const std::vector<std::tuple<int, int, int>> works{{250, 256, 64}, {128, 512, 128}};
#else
  const std::vector<std::tuple<int, int, int>> works{{250, 256, 64}};  // sanitizers take seconds
#endif
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
  // KV blocks that wait for nobody load while the layer before computes: what waits is computation.
  Profile waiting = machine;
  waiting.handover = {1e-4};
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
      const auto played = play(machine, *policy, layout,
                               {.host = run.host,
                                .device = run.device,
                                .pack = pack_limits(work.batch, run.device),
                                .requests = work.requests,
                                .sequences = work.requests,
                                .most_blocks = work.requests * 9,
                                .prompt_rows = work.requests * work.prompt,
                                .prefill_rows = run.device.max_rows - work.requests});
      ASSERT_TRUE(played);
      const double whole = work.requests * work.answer / run.whole_tokens_per_second;
      EXPECT_NEAR(played->n, whole, 0.02 * whole);
    }
  }
}

TEST(Simulation, OfAModelThatDoesNotFitFails) {
  SimulatedWork work = small_work();
  work.shape = opt_shape("opt-175b");
  EXPECT_THROW(run("hybrid", machine_named("l4-pcie4"), work), Failure);
}

}  // namespace
}  // namespace poise
