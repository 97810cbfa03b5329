#include "planner/memory/concurrency.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <span>
#include <vector>

#include "common/trouble.h"
#include "planner/memory/memory_plan.h"
#include "planner/policies/work_time.h"
#include "planner/virtual_time/rehearsal.h"

namespace poise {
namespace {

constexpr std::int32_t kFewest = 4;
constexpr double kGoodPart = 0.9;  // of the time with the most requests; fewer must beat this
constexpr double kMaxWeights = 0.75;
constexpr int kRefinements = 2;
constexpr std::int32_t kEarly = 4;  // an answer that ends early has a quarter of max_tokens

// How long the job takes, by how many requests are under way. Memory is planned for answers of
// max_tokens; the time is estimated for those and for answers that end early.
class JobTimes {
 public:
  JobTimes(const Policy& policy, const PlanningProblem& problem)
      : policy_(policy),
        problem_(problem),
        early_(problem.requests),
        layout_(weight_layout(problem.shape, problem.dtype)) {
    for (RequestSize& one : early_) {
      one.answer = (one.answer + kEarly - 1) / kEarly;
    }
  }

  // Whether the device keeps most weights beside this number of requests. If not, every iteration
  // streams most of the model, and more requests are always better.
  bool holds_most_weights(std::int32_t sequences) const {
    const Demand demand = problem_.demand(sequences);
    const RunDevice& device = problem_.device;
    const DeviceMemory memory{
        .cap = device.cap, .overhead = device.overhead, .pins_host_memory = !device.is_host};
    const DeviceRoom room =
        device_room(problem_.shape, problem_.dtype, demand, problem_.batch, memory);
    return room.left(demand.most_blocks, 0, 0).n >
           kMaxWeights * static_cast<double>(room.layer.n) * problem_.shape.num_hidden_layers;
  }

  // Of the whole job: with answers of max_tokens, and with answers that end early. Infinite where
  // memory does not suffice.
  struct Times {
    double full, early;
    std::optional<MemoryPlan> memory;  // by which they were estimated
  };
  const Times& of(std::int32_t sequences) {
    const auto [found, fresh] = seconds_.try_emplace(sequences);
    if (fresh) {
      found->second = estimate(sequences);
    }
    return found->second;
  }

 private:
  Times estimate(std::int32_t sequences) const {
    try {
      MemoryPlan made = plan_memory(policy_, problem_, problem_.demand(sequences));
      const double full = work(made, problem_.requests, sequences);
      const double early = work(made, early_, sequences);
      return {.full = full, .early = early, .memory = std::move(made)};
    } catch (const Failure&) {
      constexpr double kNever = std::numeric_limits<double>::infinity();
      return {.full = kNever, .early = kNever, .memory = std::nullopt};
    }
  }

  double work(const MemoryPlan& made, std::span<const RequestSize> requests,
              std::int32_t sequences) const {
    const Demand demand =
        demand_of(requests, sequences, problem_.kept, problem_.batch.prefill_tokens);
    Allocation blocks = made.host;
    blocks.resident_layers = made.device.resident_layers;
    return work_time(
        *problem_.profile,
        allocation_inputs(problem_.shape, problem_.dtype, demand, problem_.batch,
                          bytes_for_blocks(problem_.budget)),
        blocks,
        rehearse(*problem_.profile, policy_, layout_,
                 rehearsal_of(problem_.shape, demand, made.host, made.device, problem_.batch)));
  }

  const Policy& policy_;
  const PlanningProblem& problem_;
  std::vector<RequestSize> early_;
  const WeightLayout layout_;
  std::map<std::int32_t, Times> seconds_;
};

}  // namespace

Concurrency choose_concurrency(const Policy& policy, const PlanningProblem& problem) {
  const std::int32_t most = problem.demand(problem.batch.max_num_seqs).sequences;
  const std::int32_t least = std::max({kFewest, problem.batch.min_num_seqs, problem.fixed.running});
  if (!policy.chooses_concurrency() || problem.device.is_host || !problem.device.holds_blocks ||
      most <= least) {
    return {.sequences = most};
  }
  JobTimes times(policy, problem);
  if (!times.holds_most_weights(least)) {
    return {.sequences = most};
  }
  // Each case's time relative to the time with `most`: the least product found so far, and the least one
  // among the numbers that are clearly better in both cases.
  double best_product = 1, good_product = 1;
  std::int32_t best = most, good = most;
  const auto try_number = [&](std::int32_t n) {
    const auto& [full, early, memory] = times.of(n);
    const auto& all = times.of(most);
    const double of_full = full / all.full, of_early = early / all.early;
    const double worse = std::max(of_full, of_early), product = of_full * of_early;
    if (std::isinf(full) || std::isinf(early) || worse >= 1) {
      return false;
    }
    if (worse < kGoodPart && product < good_product) {
      good = n;
      good_product = product;
    }
    if (product >= best_product) {
      return false;
    }
    best = n;
    best_product = product;
    return true;
  };
  // From `most` downwards the time falls, once context has room on the device, and then rises.
  for (std::int32_t n = most / 2; n >= least; n /= 2) {
    if (!try_number(n) && n < best / 2) {
      break;
    }
  }
  std::int32_t step = best / 4;
  for (int i = 0; i < kRefinements && step > 0; ++i, step /= 2) {
    const std::int32_t middle = best;
    for (const std::int32_t n : {middle - step, middle + step}) {
      if (n >= least && n <= most) {
        try_number(n);
      }
    }
  }
  return {.sequences = good, .memory = times.of(good).memory};
}

}  // namespace poise
