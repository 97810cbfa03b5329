#include "planner/memory/planning_problem.h"

#include <algorithm>

#include "common/families/absorption.h"
#include "common/trouble.h"
#include "common/words.h"
#include "planner/memory/concurrency.h"
#include "planner/memory/memory_plan.h"
#include "planner/memory/overlap.h"

namespace poise {
namespace {

// In an existing pool more requests may run than have room at their ends, since answers end early.
constexpr std::int64_t kEarlyEnds = 2;

// How many of `wanted` requests can run at once in the existing blocks.
std::int32_t with_room(const PlanningProblem& problem, std::int32_t wanted) {
  if (!problem.fixed.pool) {
    return wanted;
  }
  const BlockSizes sizes = block_sizes(problem.shape, problem.dtype, problem.batch.kv_format);
  const std::int64_t smaller =
      std::min(sizes.block(BlockKind::act).n, sizes.block(BlockKind::kv).n);
  const FixedPlacement& placed = problem.fixed.placement;
  const std::int64_t blocks =
      static_cast<std::int64_t>(problem.fixed.pool->region_bytes) / smaller +
      placed.gpu_act_blocks.value_or(0) + placed.gpu_kv_blocks.value_or(0);
  const Demand all = problem.demand(wanted);
  const std::int64_t room =
      kEarlyEnds * ceil_div(all.sequences * blocks, std::max<std::int64_t>(all.most_blocks, 1));
  return static_cast<std::int32_t>(
      std::clamp<std::int64_t>(room, std::min(problem.fixed.running, wanted), wanted));
}

// The pool must hold the largest request both now and after its border has moved.
void check_room(const PlanningProblem& problem, const RunPlan& plan) {
  const PoolPartition& pool = *problem.fixed.pool;
  const std::int64_t now = std::int64_t{pool.act_blocks} + pool.kv_blocks +
                           plan.host.gpu_act_blocks + plan.host.gpu_kv_blocks;
  const std::int64_t blocks = std::min(now, plan.blocks()) + plan.host.token_blocks;
  if (blocks < plan.demand.largest_request) {
    fail_for_pool(plan.demand, blocks);
  }
}

void check_host_attention(const PlanningProblem& problem, const Allocation& host) {
  if (host.host_share <= 0) {
    return;
  }
  if (!problem.batch.host_attention) {
    fail_for_host_attention_off("this policy");
  }
  if (!problem.device.attends_on_host) {
    fail(
        "this policy has host cores attend, and what they read is not known: use another policy "
        "(kv-only keeps the same blocks), a machine with host_gbps (--machine), or a profile that "
        "was measured with them (--profile)");
  }
}

// Mini-batches of the size that the user says, or else that suits the policy or the profile. A device
// that takes host memory without a cap of its own has no size to fill.
BatchOptions batch_for(const Policy& policy, const PlanningProblem& problem) {
  if (!problem.batch.by_profile || !policy.fills_the_device() || !problem.device.holds_blocks) {
    return with_mini_batch(problem.batch,
                           deciding_costs(problem.profile, problem.batch.absorption).get());
  }
  const RunDevice& device = problem.device;
  const Bytes pinned = device.is_host ? Bytes{0} : page_tables_of(problem.budget.weights);
  return with_largest_mini_batch(problem.batch, problem.shape, problem.dtype, problem.requests,
                                 problem.kept,
                                 {.cap = device.cap,
                                  .overhead = device.overhead + pinned,
                                  .pins_host_memory = !device.is_host},
                                 problem.fixed.placement.resident_layers.value_or(0));
}

// The plan for the problem's rows of prompts and sides.
RunPlan solve_as_given(const Policy& policy, const PlanningProblem& problem) {
  const Concurrency chosen = problem.profile
                                 ? choose_concurrency(policy, problem)
                                 : Concurrency{.sequences = problem.batch.max_num_seqs};
  RunPlan plan{.batch = problem.batch, .demand = problem.demand(chosen.sequences)};
  const MemoryPlan memory =
      chosen.memory ? *chosen.memory : plan_memory(policy, problem, plan.demand);
  plan.host = memory.host;
  check_host_attention(problem, plan.host);
  plan.device = plan.device_meanwhile = memory.device;
  plan.overhead = memory.overhead;
  plan.released_layers = memory.released_layers;
  if (problem.fixed.pool) {
    check_room(problem, plan);
    plan.device_meanwhile = limits_until_border_rests(problem, plan);
  }
  return plan;
}

}  // namespace

void fail_for_host_attention_off(std::string_view policy) {
  fail(
      "--host-attention off: {} has host cores attend; use another policy (kv-only keeps the same "
      "blocks), or leave --host-attention out",
      policy);
}

void check_absorption(const ModelShape& shape, const BatchOptions& batch) {
  if (!batch.absorption) {
    return;
  }
  if (const auto why_not = why_not_absorbed(shape, batch.kv_format)) {
    fail(
        "--absorption on: this model's activations cannot be attended as they are, because {}; leave "
        "--absorption out",
        *why_not);
  }
}

RunPlan solve(const Policy& policy, const PlanningProblem& given) {
  check_absorption(given.shape, given.batch);
  PlanningProblem problem = given;
  problem.kept = kept_context(given.shape, policy);
  problem.batch = batch_for(policy, problem);
  if (const auto& pool = given.fixed.pool) {
    problem.budget.pool = bytes_of(*pool, given.shape);
  }
  problem.batch.max_num_seqs =
      with_room(problem, problem.demand(problem.batch.max_num_seqs).sequences);
  const auto plan = [&](const PlanningProblem& as_given) {
    RunPlan made = solve_as_given(policy, as_given);
    made.batch.max_num_seqs = given.batch.max_num_seqs;
    return made;
  };
  return plan_by_overlap(policy, problem, plan);
}

DeviceLimits limits_until_border_rests(const PlanningProblem& problem, const RunPlan& plan) {
  const PoolPartition& pool = *problem.fixed.pool;
  Allocation reach = plan.host;
  reach.placed = true;
  reach.act_blocks = std::max(reach.act_blocks, pool.act_blocks);
  reach.kv_blocks = std::max(reach.kv_blocks, pool.kv_blocks);
  reach.resident_layers = problem.fixed.placement.resident_layers;
  DeviceLimits limits = choose_device_limits(problem.shape, problem.dtype, plan.demand, reach,
                                             plan.batch, plan.overhead, problem.device.cap);
  if (!reach.resident_layers) {
    limits.resident_layers = std::min(limits.resident_layers, plan.device.resident_layers);
  }
  return limits;
}

bool suffices(const DeviceLimits& there, const DeviceLimits& wanted) {
  DeviceLimits with_slots = wanted;
  with_slots.act_slots = there.act_slots;
  with_slots.kv_slots = there.kv_slots;
  with_slots.resident_layers = there.resident_layers;
  return there == with_slots && there.act_slots >= wanted.act_slots &&
         there.kv_slots >= wanted.kv_slots;
}

}  // namespace poise
