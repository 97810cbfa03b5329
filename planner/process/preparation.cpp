#include "planner/process/preparation.h"

#include <fmt/core.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>

#include "common/trouble.h"
#include "common/words.h"
#include "planner/costs/costs.h"
#include "planner/costs/measuring_build.h"
#include "planner/links/announce.h"
#include "planner/links/clock.h"
#include "planner/links/greeting.h"
#include "planner/links/stale_memory.h"
#include "planner/policies/default_policy.h"
#include "planner/profile/profile_run.h"
#include "planner/record/log_note.h"
#include "planner/results/results_directory.h"

namespace poise {
namespace {

constexpr Seconds kMessageWait{0.1};
constexpr Seconds kShortWait{0.005};  // where two sockets, or memory, are looked at in turn

MoreRequests more_requests(const Run& run, const Demand& demand) {
  const std::int64_t most = std::ssize(run.to_do);
  if (demand.sequences >= most) {
    return MoreRequests::none;
  }
  return demand.sequences < std::min<std::int64_t>(most, run.options.batch.max_num_seqs)
             ? MoreRequests::slower
             : MoreRequests::possible;
}

// True once the host has all weights that the device lacks, and no pool of an ended planner except one
// that this planner takes over.
bool host_is_in_order(Run& run, HandOver& hand_over) {
  if (run.loader->gives_back() || run.loader->asked_for_weights()) {
    return false;
  }
  const StaleMemory left =
      find_stale_memory(*run.control, *run.executor->greeting(), run.options.takes_over);
  if (!left.anything()) {
    return true;
  }
  if (left.lost_layers > 0) {
    hand_over.lose(Lost::everything);
  }
  reclaim(*run.loader, left);
  return false;
}

}  // namespace

bool Preparation::step() {
  switch (phase_) {
    case Phase::loading:
      return load();
    case Phase::greeting:
      return greet();
    case Phase::unmapping: {
      const bool moved = run_.step_executor(kShortWait);
      if (run_.executor->returned()) {  // another one, which maps nothing
        begin_again();
      } else if (returned_->is_spare()) {
        decide();
      }
      return moved;
    }
    case Phase::profiling:
      return measure();
    case Phase::holding:
      return hold();
    case Phase::releasing: {
      const bool moved = run_.loader->step(kMessageWait);
      if (!run_.loader->asked_for_weights()) {
        log_note(
            *run_.order_log, run_.options.run_id,
            messages::WeightsHeldT{
                .done = true, .released_layers = in_force_.plan.released_layers, .sentence = {}});
        claim_pool();
      }
      return moved;
    }
    case Phase::claiming: {
      const bool moved = run_.loader->step(kMessageWait);
      if (run_.loader->grant() && run_.loader->settled()) {
        phase_ = Phase::over;
      }
      return moved;
    }
    case Phase::over:
      break;
  }
  check(false, "a preparation that is over takes no step");
  return false;
}

void Preparation::begin_again() {
  run_.status.state = "preparing";
  phase_ = Phase::greeting;
  returned_.reset();
}

void Preparation::begin_again_without_pool() {
  begin_again();
  run_.loader->release();
  returned_.emplace(*run_.control, *run_.executor);
}

// ---- what is to be done

bool Preparation::load() {
  if (!weights_sealed(*run_.control)) {
    usleep(static_cast<useconds_t>(kShortWait.n * 1e6));
    return false;
  }
  run_.status.reach("model");
  take_stock();
  return true;
}

void Preparation::take_stock() {
  const RunOptions& options = run_.options;
  if (run_.front) {
    if (!options.takes_over) {
      remove_log(options.run_dir / kOrdersName);
    }
    begin_greeting();
    return;
  }
  if (!files_.open_results()) {
    spdlog::info("the run is finished already");
    answered_ = true;
    phase_ = Phase::over;
    return;
  }
  for (const Request& request : run_.input.requests.requests) {
    if (!run_.results || !run_.results->is_done(request.line())) {
      run_.to_do.push_back(&request);
      run_.status.tokens_left += request.sampling.max_tokens;
    }
  }
  spdlog::info("{} to do, {} done", counted(std::ssize(run_.to_do), "request"),
               counted(run_.results ? run_.results->counts().lines() : 0, "line"));
  if (run_.to_do.empty()) {
    replace_finished_run();
    answered_ = true;
    phase_ = Phase::over;
    return;
  }
  hand_over_.read();
  begin_greeting();
}

// ---- with whom

void Preparation::begin_greeting() {
  const RunOptions& options = run_.options;
  run_.order_log = files_.open_order_log();
  Links links =
      open_links(*run_.control, options.run_id, options.executor_socket, options.loader_socket,
                 options.host_memory, run_.kv_format(), *run_.order_log);
  run_.executor = std::move(links.executor);
  run_.loader = std::move(links.loader);
  run_.status.state = "preparing";
  phase_ = Phase::greeting;
}

bool Preparation::greet() {
  LoaderLink& loader = *run_.loader;
  ExecutorLink& executor = *run_.executor;
  const bool loader_waits = !loader.greeted() || loader.gives_back() || loader.asked_for_weights();
  const bool loader_moved = loader.step(loader_waits ? kShortWait : Seconds{0});
  const bool executor_moved = executor.step(executor.greeting() ? Seconds{0} : kShortWait);
  if (loader.greeted() && executor.greeting() && host_is_in_order(run_, hand_over_) &&
      (in_force_.policy || find_profile())) {
    if (executor.returned()) {  // another one, which maps nothing
      returned_.reset();
    }
    if (returned_) {  // the executor stays as it is configured, but without a pool
      run_.executor->configure(in_force_.device, run_.device_cap(), run_.layout(),
                               run_.options.trace);
      phase_ = Phase::unmapping;
    } else {
      decide();
    }
  }
  return loader_moved || executor_moved;
}

// ---- by which costs

// Chooses the policy, and the costs if they are known. False if they must be measured
// first.
bool Preparation::find_profile() {
  const RunOptions& options = run_.options;
  check_absorption(run_.shape(), options.batch);
  const std::string& device = run_.executor->greeting()->device;
  const CostOptions costs{options.machine, options.profile};
  policy_name_ =
      policy_or_default(options.policy, run_.device_is_host(), costs, options.policy_options);
  if (auto named = named_costs(costs, run_.shape(), run_.dtype(), run_.kv_format())) {
    use_profile(*std::move(named));
    return true;
  }
  if (options.profile_dir.empty()) {
    return true;
  }
  const std::string fingerprint =
      profile_fingerprint(device, run_.shape(), run_.dtype(), run_.kv_format());
  std::string known = "is not known yet; measuring it once";
  try {
    if (auto kept = read_profile(kept_profile(options.profile_dir, fingerprint), fingerprint)) {
      // A planner that takes over cannot measure, so another build's is better than none.
      if (kept->build == measuring_build() || options.takes_over) {
        use_profile(std::move(*kept));
        return true;
      }
      known = "was measured by another build; measuring it again";
    }
  } catch (const Failure& broken) {  // of an older version, say
    spdlog::warn("{}", broken.what());
  }
  // A planner that takes over finds a pool in use: measuring would want another.
  const bool wanted = !options.takes_over && policy_named(policy_name_).needs_profile &&
                      !options.policy_options.act_share &&
                      (!run_.device_is_host() || options.policy.has_value());
  if (!wanted) {
    if (!run_.device_is_host() && !options.takes_over && !options.policy_options.act_share) {
      fmt::print(
          "policy {}: what everything costs on {} is not known, so buffers and mini-batches have "
          "sizes that do for any GPU; `poise profile` measures it in about a minute and keeps it, "
          "and runs that know it are up to a tenth faster\n",
          policy_name_, device);
      std::fflush(stdout);
    }
    return true;
  }
  fmt::print(
      "policy {}: what everything costs on {} {}, to balance the link and the device; it is kept "
      "for later runs\n",
      policy_name_, device, known);
  std::fflush(stdout);
  try {
    begin_profiling();
    return false;
  } catch (const Failure& too_small) {  // for measuring, which is not to say for the run
    fmt::print("it is not measured: {}\n", too_small.what());
    std::fflush(stdout);
    return true;
  }
}

void Preparation::begin_profiling() {
  measurement_ = std::make_unique<CostMeasurement>(
      profiled_machine(*run_.control, *run_.executor->greeting(), run_.options.gpu_memory,
                       run_.options.host_memory, run_.kv_format()),
      *run_.control, *run_.loader, *run_.executor);
  run_.executor->log_to(files_.open_profile_log());
  phase_ = Phase::profiling;
  run_.status.state = "measuring";
}

bool Preparation::measure() {
  const bool moved = measurement_->step(kMessageWait);
  run_.status.measured = measurement_->share();
  if (measurement_->done()) {
    run_.status.state = "preparing";
    Profile profile = measurement_->profile();
    keep_profile(run_.options.profile_dir, profile);
    use_profile(std::move(profile));
    measurement_->give_back();
  } else if (measurement_->gave_back()) {  // the run is planned with its memory
    measurement_.reset();
    run_.executor->log_to(*run_.order_log);
    files_.close_profile_log();
    decide();
  }
  return moved;
}

void Preparation::use_profile(Profile profile) {
  files_.keep(profile);
  in_force_.profile = std::make_shared<const Profile>(std::move(profile));
}

// ---- how large everything is made

void Preparation::decide() {
  run_.status.reach("decided");
  const bool pool_stands = make_room_as_wished();
  say_plan(pool_stands);
  if (pool_stands) {
    phase_ = Phase::claiming;
  } else if (in_force_.plan.released_layers > 0) {
    run_.print(fmt::format(
        "the weights of {} stay on the device alone; their host memory goes to blocks\n",
        counted(in_force_.plan.released_layers, "layer")));
    run_.executor->configure(in_force_.device, run_.device_cap(), run_.layout(),
                             run_.options.trace);
    phase_ = Phase::holding;
  } else {
    claim_pool();
  }
}

// True if the existing pool suffices. A wish that came with this planner comes into force if there is
// room for it; otherwise it is refused, and the earlier policy decides.
bool Preparation::make_room_as_wished() {
  const bool costs_decide = in_force_.profile != nullptr;
  const PolicyWish by_default{
      // `optimal` needs costs, which a policy that the user did not name can do without.
      .policy = !run_.options.policy && !costs_decide && policy_name_ == "optimal" ? "hybrid"
                                                                                   : policy_name_,
      .act_share = run_.options.policy_options.act_share,
      .recompute_share = run_.options.policy_options.recompute_share};
  while (true) {
    change_.choose(by_default);
    try {
      const bool pool_stands = make_room();
      change_.accept();
      return pool_stands;
    } catch (const Failure& refusal) {
      if (!change_.is_untried()) {
        throw;
      }
      change_.refuse(refusal);
    }
  }
}

bool Preparation::make_room() {
  const bool pool_stands = keep_pool();
  if (!pool_stands) {
    in_force_.plan =
        solve(*in_force_.policy, planning_problem(run_, run_.to_do, in_force_.profile, {}));
    in_force_.device = in_force_.plan.device;
  }
  return pool_stands;
}

// The pool that is there, with what lies in it where a journal says what that is. False: another one
// must be claimed.
bool Preparation::keep_pool() {
  const std::uint64_t epoch = run_.control->pool_epoch.load(std::memory_order_acquire);
  if (!run_.options.takes_over || epoch == 0 || run_.control->kv_format != run_.kv_format()) {
    hand_over_.lose(Lost::everything);
    return false;
  }
  const PoolPartition pool = run_.control->pool;
  run_.loader->take_over({.pool_epoch = epoch, .partition = pool});
  if (hand_over_.journal()) {
    try {
      in_force_.plan = plan_with_pool(run_, in_force_, hand_over_.fixed_resources(pool));
      in_force_.device = in_force_.plan.device_meanwhile;
      change_.begin_border_move();
      return true;
    } catch (const Failure& failure) {
      if (change_.is_untried()) {  // under another policy, what is under way can be kept
        throw;
      }
      announce(fmt::format("{}; what was under way is computed again", failure.what()));
      hand_over_.drop();
    }
  }
  try {
    // One that is smaller is not this run's (it was made to measure costs), or of little use.
    const RunPlan anew = solve(
        *in_force_.policy,
        planning_problem(run_, run_.to_do, in_force_.profile, {}, bytes_of(pool, run_.shape())));
    if (region_bytes(run_.block_sizes(), anew.host) / 10 * 9 > pool.region_bytes) {
      run_.loader->forget_grant();
      return false;
    }
    in_force_.plan = plan_with_pool(run_, in_force_, {.pool = pool});
    in_force_.device = in_force_.plan.device;
  } catch (const Failure& failure) {
    spdlog::warn("the pool that is there does not do: {}", failure.what());
    run_.loader->forget_grant();
    return false;
  }
  run_.loader->move_border(in_force_.plan.host.act_blocks, in_force_.plan.host.kv_blocks);
  return true;
}

void Preparation::say_plan(bool pool_stands) {
  const RunPlan& plan = in_force_.plan;
  const ModelShape& shape = run_.shape();
  const BlockSizes sizes = run_.block_sizes();
  const std::uint64_t region =
      pool_stands ? run_.loader->grant()->partition.region_bytes : region_bytes(sizes, plan.host);
  const DeviceMemoryPlan device =
      plan_device_memory(shape, run_.dtype(), in_force_.device, plan.overhead);
  const std::string& name = run_.executor->greeting()->device;
  RunStatus& status = run_.status;
  status.facts = {.device = run_.device_is_host() ? "CPU device" : "GPU",
                  .more_requests = more_requests(run_, plan.demand),
                  .act_is_smaller = sizes.act_row < sizes.kv_row};
  status.device = name;
  status.act_blocks = plan.host.act_blocks;
  status.kv_blocks = plan.host.kv_blocks;
  status.layers = shape.num_hidden_layers;
  status.resident_layers = in_force_.device.resident_layers;
  status.host_pool = {static_cast<std::int64_t>(region) * shape.num_hidden_layers};
  status.device_memory = device.total;
  run_.print(fmt::format(
      "policy {}: up to {} at a time, {} ACT and {} on the host, {}, and {} ACT and {} on the "
      "device{}; {}:\n{}",
      status.policy, counted(plan.demand.sequences, "request"), plan.host.act_blocks,
      counted(plan.host.kv_blocks, "KV block"), size_text(status.host_pool),
      plan.host.gpu_act_blocks, counted(plan.host.gpu_kv_blocks, "KV block"),
      in_force_.device.absorption && plan.host.all_act_blocks() > 0
          ? "; answers attend ACT blocks as they are (--absorption on)"
          : "",
      name, to_text(device)));
}

// ---- the pool

// The device holds the layers: the host need not.
bool Preparation::hold() {
  const bool moved = run_.step_executor(kMessageWait);
  if (run_.executor->returned()) {  // another one, which holds nothing
    begin_again();
  } else if (run_.executor->ready()) {
    run_.loader->release_weights(in_force_.plan.released_layers);
    phase_ = Phase::releasing;
  }
  return moved;
}

void Preparation::claim_pool() {
  run_.loader->claim(region_bytes(run_.block_sizes(), in_force_.plan.host), in_force_.plan.host);
  phase_ = Phase::claiming;
}

}  // namespace poise
