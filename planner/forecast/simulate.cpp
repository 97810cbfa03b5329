#include "planner/forecast/simulate.h"

#include <algorithm>
#include <vector>

#include "common/weight_layout.h"
#include "planner/memory/planning_problem.h"
#include "planner/schedule/iteration.h"
#include "planner/schedule/schedule.h"
#include "planner/virtual_time/virtual_executor.h"

namespace poise {
namespace {

constexpr Bytes kDeviceOverhead = kGiB;  // a GPU's context and its libraries' workspaces
constexpr TokenId kAnyToken = 0;

std::vector<Request> requests_of(const SimulatedWork& work) {
  std::vector<Request> requests(static_cast<std::size_t>(work.requests));
  for (std::size_t i = 0; i < requests.size(); ++i) {
    requests[i].id = {static_cast<std::uint32_t>(i + 1)};
    requests[i].prompt = std::vector<TokenId>(static_cast<std::size_t>(work.prompt), kAnyToken);
    requests[i].sampling.max_tokens = work.answer;
  }
  return requests;
}

// What was done, and by when.
struct Mark {
  Seconds now{}, link{}, compute{}, host{};
  LinkVolume volume;
  std::int64_t iterations = 0, tokens = 0;
};

// The phase that an iteration of these chunks belongs to.
SimulatedPhase& phase_of(std::span<const ScheduledChunk> chunks, SimulatedRun& run) {
  const auto answers = std::ranges::count(chunks, 1, &ScheduledChunk::new_tokens);
  return answers == 0 ? run.prompts : answers < std::ssize(chunks) ? run.both : run.answers;
}

PlanningProblem problem_of(const Profile& profile, const SimulatedWork& work,
                           const std::vector<Request>& requests, Bytes weights) {
  std::vector<const Request*> all;
  for (const Request& request : requests) {
    all.push_back(&request);
  }
  PlanningProblem problem{.shape = work.shape,
                          .dtype = work.dtype,
                          .requests = sizes_of(all),
                          .batch = work.batch,
                          .budget = {.weights = weights,
                                     .available = profile.host_memory - weights,
                                     .host_memory = {}},
                          .device = {.cap = profile.gpu_memory,
                                     .overhead = kDeviceOverhead,
                                     .attends_on_host = profile.knows_host()},
                          .profile = std::make_shared<const Profile>(profile)};
  problem.fixed.placement = work.placement;
  if (!work.overlapped) {
    problem.batch.prompt_rows = work.batch.prefill_tokens;
    problem.batch.sides = kFewestSides;
  }
  return problem;
}

}  // namespace

SimulatedPhase operator+(const SimulatedPhase& a, const SimulatedPhase& b) {
  return {.iterations = a.iterations + b.iterations,
          .time = a.time + b.time,
          .link = a.link + b.link,
          .compute = a.compute + b.compute};
}

SimulatedRun simulate(const Profile& profile, std::string_view policy_name,
                      const PolicyOptions& options, const SimulatedWork& work) {
  const auto policy = make_policy(policy_name, options);
  const std::vector<Request> requests = requests_of(work);
  const WeightLayout layout = weight_layout(work.shape, work.dtype);
  const RunPlan made = solve(*policy, problem_of(profile, work, requests, layout.total()));
  const Demand& demand = made.demand;
  SimulatedRun run;
  run.prompt_rows = *made.batch.prompt_rows;
  run.host = made.host;
  run.device = made.device;
  const PackLimits limits = pack_limits(made.batch, run.device);
  const PackingRule packing{.policy = *policy, .host = run.host, .limits = limits};

  Scheduler scheduler(*policy, run.host, schedule_limits(made.batch, demand, run.host, run.device));
  for (const Request& request : requests) {
    scheduler.add(request);
  }
  OrderTables tables(run.host, windows_of(work.shape), run.device.absorption);
  VirtualExecutor executor(profile, layout, run.device, windows_of(work.shape));
  Mark begin{}, end{};
  bool steady = false, answered = false;
  while (!scheduler.idle() && (work.to_the_end || !(steady && answered))) {
    const auto chunks = scheduler.next();
    const bool prompts =
        scheduler.waiting() > 0 || std::ranges::any_of(chunks, [](const ScheduledChunk& chunk) {
          return chunk.new_tokens > 1;
        });
    if (!prompts && !answered && !steady && !work.to_the_end) {
      begin = end;
      steady = true;
    }
    // Halfway through the answers, every pipeline is full.
    executor.trace(work.traced && steady && run.spans.empty() &&
                           end.iterations - begin.iterations >= work.answer / 2
                       ? &run.spans
                       : nullptr);
    const IterationName name{.number = static_cast<std::uint64_t>(++run.iterations)};
    executor.run(plan_iteration(packing, chunks, tables, name), scheduler.last_iteration());
    const auto outcomes = any_outcomes(chunks);
    SimulatedPhase& phase = phase_of(chunks, run);
    phase = phase + SimulatedPhase{.iterations = 1,
                                   .time = executor.now() - end.now,
                                   .link = executor.link_busy() - end.link,
                                   .compute = executor.compute_busy() - end.compute};
    answered = answered ||
               std::ranges::any_of(outcomes, [](const Outcome& outcome) { return !outcome.token; });
    end = {.now = executor.now(),
           .link = executor.link_busy(),
           .compute = executor.compute_busy(),
           .host = executor.host_busy(),
           .volume = executor.volume(),
           .iterations = run.iterations,
           .tokens = end.tokens + std::ssize(outcomes)};
    scheduler.complete(outcomes);
  }
  run.whole_tokens_per_second = static_cast<double>(end.tokens) / end.now.n;
  const double seconds = (end.now - begin.now).n;
  run.tokens_per_second = static_cast<double>(end.tokens - begin.tokens) / seconds;
  run.counted = end.iterations - begin.iterations;
  const BlockSizes sizes = block_sizes(work.shape, work.dtype, work.batch.kv_format);
  const auto bytes = [&](double LinkVolume::*what, Bytes each) {
    return (end.volume.*what - begin.volume.*what) * static_cast<double>(each.n);
  };
  run.loaded = {.weights = bytes(&LinkVolume::layers, layout.layer.bytes),
                .kv = bytes(&LinkVolume::kv, sizes.block(BlockKind::kv)),
                .act = bytes(&LinkVolume::act, sizes.block(BlockKind::act))};
  run.link_busy = (end.link - begin.link).n / seconds;
  run.compute_busy = (end.compute - begin.compute).n / seconds;
  run.host_busy = (end.host - begin.host).n / seconds;
  return run;
}

}  // namespace poise
