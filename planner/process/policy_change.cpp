#include "planner/process/policy_change.h"

#include <fmt/core.h>
#include <spdlog/spdlog.h>

#include <algorithm>

#include "common/testing/failpoint.h"
#include "common/trouble.h"
#include "common/words.h"
#include "planner/links/announce.h"
#include "planner/links/clock.h"
#include "planner/record/log_note.h"

namespace poise {
namespace {

constexpr Seconds kLoaderWait{0.1};     // for the loader, where nothing else is to be done
constexpr Seconds kBetweenMoves{0.02};  // of the border

}  // namespace

PolicyChange::PolicyChange(Run& run, PlanInForce& in_force)
    : run_(run), in_force_(in_force), wishes_(run.options.run_dir) {}

// ---- before the first plan

void PolicyChange::choose(const PolicyWish& by_default) {
  if (in_force_.policy) {
    return;
  }
  const auto obey = [&](const PolicyWish& wish) {
    in_force_.policy = make_policy_as(wish, run_, in_force_.profile);
    in_force_.wish = wish;
    run_.status.policy = wish.policy;
  };
  if (run_.options.takes_over) {
    if (wishes_.changed()) {
      PolicyWish wish;
      try {
        wish = wishes_.read();
        obey(wish);
        untried_ = wish;
        run_.status.policy_refusal.clear();
      } catch (const Failure& refusal) {
        refuse(refusal);
      }
      run_.status.policy_serial = wish.serial;
    }
    if (const auto wish = wishes_.in_force(); wish && !in_force_.policy) {
      try {
        obey(*wish);
      } catch (const Failure& gone) {  // the file that described its machine
        announce(fmt::format("{} is not in force any more: {}", wish->policy, gone.what()));
      }
    }
  }
  if (!in_force_.policy) {
    obey(by_default);
  }
}

void PolicyChange::accept() {
  if (untried_) {
    record(*untried_);
    untried_.reset();
  }
}

void PolicyChange::refuse(const Failure& refusal) {
  spdlog::warn("a policy is refused: {}", refusal.what());
  run_.status.policy_refusal = refusal.what();
  if (untried_) {
    untried_.reset();
    in_force_.policy.reset();
  }
}

// The policy is in force, whether or not the disk takes its name.
void PolicyChange::record(const PolicyWish& wish) const {
  try {
    wishes_.put_in_force(wish);
  } catch (const Failure& failure) {
    announce(fmt::format("{}; the run goes on with {}", failure.what(), wish.policy));
  }
}

// ---- between two iterations

PolicyChange::Next PolicyChange::step(RunLoop& loop) {
  if (!border_rests(loop)) {
    return Next::wait;
  }
  if (wishes_.changed()) {
    if (const Next next = obey(loop); next != Next::go_on) {
      return next;
    }
  }
  return move_border(loop);
}

// Waits a moment for a border that the loader moves; true where it is not, or not any more, under way.
bool PolicyChange::border_rests(RunLoop& loop) {
  if (run_.loader->settled()) {
    return true;
  }
  run_.loader->step(kLoaderWait);
  if (!run_.loader->settled()) {
    return false;
  }
  const PoolPartition& pool = run_.loader->grant()->partition;
  loop.use_partition(pool);
  run_.status.act_blocks = pool.act_blocks;
  run_.status.kv_blocks = pool.kv_blocks;
  log_pool();
  return true;
}

PolicyChange::Next PolicyChange::obey(RunLoop& loop) {
  RunStatus& status = run_.status;
  PolicyWish wish;
  Next next = Next::go_on;
  status.policy_refusal.clear();
  status.policy_held_back.clear();
  try {
    wish = wishes_.read();
    auto policy = make_policy_as(wish, run_, in_force_.profile);
    next = wish.rebuild ? rebuild_for(wish, std::move(policy), loop)
                        : swap_to(wish, std::move(policy), loop);
    record(wish);
    status.policy = wish.policy;
    status.policy_since = loop.next_iteration();
  } catch (const Failure& refusal) {
    refuse(refusal);
  }
  status.policy_serial = wish.serial;
  status.answer_wish();
  return next;
}

PolicyChange::Next PolicyChange::swap_to(const PolicyWish& wish, std::unique_ptr<Policy> policy,
                                         RunLoop& loop) {
  const std::vector<const Request*> unanswered = loop.unanswered();
  const PlanningProblem problem =
      planning_problem(run_, unanswered, in_force_.profile, loop.fixed_resources());
  RunPlan plan = solve(*policy, problem);
  try {
    const RunPlan anew =
        solve(*policy, planning_problem(run_, unanswered, in_force_.profile, {},
                                        bytes_of(*problem.fixed.pool, run_.shape())));
    run_.status.policy_held_back = held_back(plan, anew);
  } catch (const Failure&) {  // beside others' memory there is no room for other pools
  }
  const bool fits = suffices(in_force_.device, plan.device_meanwhile);
  in_force_.device = fits ? in_force_.device : plan.device_meanwhile;
  in_force_.plan = std::move(plan);
  in_force_.wish = wish;
  const auto before = std::exchange(in_force_.policy, std::move(policy));  // the loop has it still
  loop.use_plan();
  border_moves_ = true;
  failpoint("planner.policy_swapped");
  keep_plan(run_, in_force_, run_.loader->grant()->pool_epoch);
  log_policy(loop.next_iteration());
  announce(
      fmt::format("policy {} from iteration {} on: {} ACT and {} are wished on the host{}",
                  wish.policy, loop.next_iteration(), in_force_.plan.host.act_blocks,
                  counted(in_force_.plan.host.kv_blocks, "KV block"),
                  run_.status.policy_held_back.empty() ? "" : "; " + run_.status.policy_held_back));
  return fits ? Next::go_on : Next::configure;
}

// Whether pools can be made for the policy is seen before those that stand are given back.
PolicyChange::Next PolicyChange::rebuild_for(const PolicyWish& wish, std::unique_ptr<Policy> policy,
                                             RunLoop& loop) {
  const PoolPartition& pool = run_.loader->grant()->partition;
  solve(*policy, planning_problem(run_, loop.unanswered(), in_force_.profile, {},
                                  bytes_of(pool, run_.shape())));
  in_force_.policy = std::move(policy);
  in_force_.wish = wish;
  announce(
      fmt::format("policy {} from iteration {} on: pools are made anew, requests under way are "
                  "computed again",
                  wish.policy, loop.next_iteration()));
  return Next::rebuild;
}

// As far towards the plan's split as free blocks allow.
PolicyChange::Next PolicyChange::move_border(RunLoop& loop) {
  if (!border_moves_) {
    return Next::go_on;
  }
  const PoolPartition& now = run_.loader->grant()->partition;
  const RunPlan& plan = in_force_.plan;
  if (now.act_blocks == plan.host.act_blocks && now.kv_blocks == plan.host.kv_blocks) {
    border_moves_ = false;
    if (in_force_.device == plan.device) {
      return Next::go_on;
    }
    in_force_.device = plan.device;  // buffers for the blocks of before are not needed any more
    loop.use_plan();
    return Next::configure;
  }
  const Seconds time = monotonic_now();
  if (time - border_moved_ < kBetweenMoves) {
    return Next::go_on;
  }
  // Where tokens are kept nowhere, a pool may hold less than the largest request.
  const std::int64_t least =
      std::min<std::int64_t>(plan.demand.largest_request, loop.blocks().total());
  const PoolPartition next =
      border_toward(now, plan.host, loop.blocks(), run_.block_sizes(), least);
  if (next.act_blocks == now.act_blocks && next.kv_blocks == now.kv_blocks) {
    return Next::go_on;
  }
  border_moved_ = time;
  run_.loader->move_border(next.act_blocks, next.kv_blocks);
  return Next::wait;
}

// ---- the log

void PolicyChange::log_policy(std::uint64_t iteration) const {
  messages::PolicyInForceT note;
  note.iteration = iteration;
  note.policy = in_force_.wish.policy;
  note.act_blocks = in_force_.plan.host.act_blocks;
  note.kv_blocks = in_force_.plan.host.kv_blocks;
  log_note(*run_.order_log, run_.options.run_id, std::move(note));
}

void PolicyChange::log_pool() const {
  const LoaderLink::Grant& grant = *run_.loader->grant();
  messages::PoolGrantT note;
  note.granted = true;
  note.pool_epoch = grant.pool_epoch;
  note.region_bytes = grant.partition.region_bytes;
  note.act_blocks = grant.partition.act_blocks;
  note.kv_blocks = grant.partition.kv_blocks;
  note.kv_format = static_cast<messages::KvFormat>(run_.kv_format());
  log_note(*run_.order_log, run_.options.run_id, std::move(note));
}

}  // namespace poise
