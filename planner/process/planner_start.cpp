// Planner's phases before the first iteration: what is to be done, with whom, and how large
// everything is made.

#include <fmt/core.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>

#include "common/sha256.h"
#include "common/trouble.h"
#include "common/words.h"
#include "planner/costs/costs.h"
#include "planner/links/clock.h"
#include "planner/links/greeting.h"
#include "planner/memory/concurrency.h"
#include "planner/memory/memory_plan.h"
#include "planner/policies/default_policy.h"
#include "planner/process/planner.h"
#include "planner/profile/profile_run.h"
#include "planner/results/result_line.h"
#include "planner/results/results_directory.h"
#include "planner/results/results_start.h"

namespace poise {
namespace {

constexpr Seconds kMessageWait{0.1};
constexpr Seconds kShortWait{0.005};  // where two sockets, or memory, are looked at in turn

std::string fingerprint_of(const ControlSegment& control) {
  return to_hex(std::to_array(control.fingerprint));
}

}  // namespace

bool Planner::load() {
  if (!weights_sealed(*control_)) {
    usleep(static_cast<useconds_t>(kShortWait.n * 1e6));
    return false;
  }
  open_results_and_take_stock();
  return true;
}

void Planner::open_results_and_take_stock() {
  const bool goes_on = run_state(options_.run_dir) == RunState::unfinished;
  const InputOptions& input = options_.input;
  results_ = open_results(
      options_.run_dir, options_.resume,
      {.build = build_id(),
       .input = input_.requests.digest,
       .model = fingerprint_of(*control_),
       .options = {{"--dtype", std::string(name_of(control_->dtype))},
                   {"--seed", std::to_string(input.seed)},
                   {"--max-model-len", input.max_model_len ? std::to_string(*input.max_model_len)
                                                           : std::string("the model's")},
                   {"--served-model-name", options_.served_model_name},
                   {"--skip-tokenizer-init", input.skip_tokenizer_init ? "yes" : "no"},
                   {"tokenizer files", input.skip_tokenizer_init
                                           ? std::string("not read")
                                           : tokenizer_files_digest(input.model)},
                   {"generation_config.json", generation_config_digest(input.model)}}},
      input_lines_);
  if (!results_) {
    spdlog::info("the run is finished already");
    status_.done = status_.requests;
    outcome_ = Exit::done;
    phase_ = Phase::over;
    return;
  }
  for (const RequestError& error : input_.requests.errors) {
    if (!results_->is_done(error.line)) {
      results_->append(error.line, true, error_line(error), monotonic_now());
    }
  }
  for (const Request& request : input_.requests.requests) {
    if (!results_->is_done(request.id)) {
      to_do_.push_back(&request);
      status_.tokens_left += request.sampling.max_tokens;
    }
  }
  spdlog::info("{} to do, {} done", counted(std::ssize(to_do_), "request"),
               counted(results_->counts().lines(), "line"));
  if (to_do_.empty()) {
    finish();
    return;
  }
  if (!goes_on) {  // the orders of an earlier run, if any, are not this one's
    std::filesystem::remove(options_.run_dir / "orders.log");
  }
  read_journal();
  begin_greeting();
}

void Planner::begin_greeting() {
  order_log_ =
      open_order_log(options_.run_dir / "orders.log", order_log_header(*control_, options_.run_id));
  Links links = open_links(*control_, options_.run_id, options_.executor_socket,
                           options_.loader_socket, options_.host_memory, *order_log_);
  executor_ = std::move(links.executor);
  loader_ = std::move(links.loader);
  status_.state = "preparing";
  phase_ = Phase::greeting;
}

bool Planner::greet() {
  const bool loader_waits =
      !loader_->greeted() || loader_->gives_back() || loader_->asked_for_weights();
  const bool loader_moved = loader_->step(loader_waits ? kShortWait : Seconds{0});
  const bool executor_moved = executor_->step(executor_->greeting() ? Seconds{0} : kShortWait);
  if (loader_->greeted() && executor_->greeting() && host_is_in_order() &&
      (policy_ || find_profile())) {
    decide_sizes();
  }
  report();
  return loader_moved || executor_moved;
}

// Which policy, and what everything costs, where that is known. False where it is to be measured
// first: it would decide by costs that nobody has.
bool Planner::find_profile() {
  const ModelShape& shape = control_->shape;
  const DType dtype = control_->dtype;
  const std::string& device = executor_->greeting()->device;
  const bool device_is_host = device.starts_with("cpu");
  const CostOptions costs{options_.machine, options_.profile};
  policy_name_ = policy_or_default(options_.policy, device_is_host, costs, options_.policy_options);
  if (auto named = named_costs(costs, shape, dtype)) {
    use_profile(*std::move(named));
    return true;
  }
  if (options_.profile_dir.empty()) {
    return true;
  }
  const std::string fingerprint = profile_fingerprint(device, shape, dtype);
  try {
    if (auto kept = read_profile(kept_profile(options_.profile_dir, fingerprint), fingerprint)) {
      use_profile(std::move(*kept));
      return true;
    }
  } catch (const Failure& broken) {  // of an older version, say
    spdlog::warn("{}", broken.what());
  }
  // A planner that takes over finds a pool in use: measuring would want another.
  const bool wanted = !options_.takes_over && policy_named(policy_name_).needs_profile &&
                      !options_.policy_options.act_share &&
                      (!device_is_host || options_.policy.has_value());
  if (!wanted) {
    return true;
  }
  fmt::print("policy {}: what everything costs on {} is not known yet; measuring it once\n",
             policy_name_, device);
  std::fflush(stdout);
  try {
    profiler_ =
        std::make_unique<Profiler>(profiled_machine(*control_, *executor_->greeting(),
                                                    options_.gpu_memory, options_.host_memory),
                                   *loader_, *executor_);
  } catch (const Failure& too_small) {  // for measuring, which is not to say for the run
    fmt::print("it is not measured: {}\n", too_small.what());
    std::fflush(stdout);
    return true;
  }
  profile_log_ = open_order_log(options_.run_dir / "profile-orders.log",
                                order_log_header(*control_, options_.run_id));
  executor_->log_to(*profile_log_);
  phase_ = Phase::profiling;
  status_.state = "measuring";
  return false;
}

bool Planner::measure() {
  const bool moved = profiler_->step(kMessageWait);
  status_.measured = profiler_->share();
  if (profiler_->done()) {
    status_.state = "preparing";
    Profile profile = profiler_->profile();
    profiler_.reset();
    keep_profile(options_.profile_dir, profile);
    use_profile(std::move(profile));
    executor_->log_to(*order_log_);
    profile_log_.reset();
    decide_sizes();
  }
  report();
  return moved;
}

void Planner::use_profile(Profile profile) {
  write_profile(options_.run_dir / "profile.json", profile);
  profile_ = std::make_shared<const Profile>(std::move(profile));
}

void Planner::decide_sizes() {
  const ExecutorLink::Greeting& device = *executor_->greeting();
  const ModelShape& shape = control_->shape;
  const DType dtype = control_->dtype;
  const bool device_is_host = device.device.starts_with("cpu");
  choose_policy();
  options_.batch = with_mini_batch(options_.batch, profile_.get());
  const bool there = make_room_as_wished(device_is_host);
  pack_limits_ = pack_limits(options_.batch, device_limits_);
  const std::uint64_t region = there ? loader_->grant()->partition.region_bytes
                                     : region_bytes(block_sizes(shape, dtype), host_);
  const DeviceMemoryPlan plan = plan_device_memory(shape, dtype, device_limits_, device_overhead_);
  const BlockSizes sizes = block_sizes(shape, dtype);
  status_.facts = {.device = device_is_host ? "CPU device" : "GPU",
                   .more_requests = more_requests(),
                   .act_is_smaller = sizes.act_row < sizes.kv_row};
  status_.device = device.device;
  status_.act_blocks = host_.act_blocks;
  status_.kv_blocks = host_.kv_blocks;
  status_.layers = shape.num_hidden_layers;
  status_.resident_layers = device_limits_.resident_layers;
  status_.host_pool = {static_cast<std::int64_t>(region) * shape.num_hidden_layers};
  status_.device_memory = plan.total;
  const std::string text = fmt::format(
      "policy {}: up to {} at a time, {} ACT and {} on the host, {}, and {} ACT and {} on the "
      "device; {}:\n{}",
      status_.policy, counted(demand_.sequences, "request"), host_.act_blocks,
      counted(host_.kv_blocks, "KV block"), size_text(status_.host_pool), host_.gpu_act_blocks,
      counted(host_.gpu_kv_blocks, "KV block"), device.device, to_text(plan));
  fmt::print("{}", text);
  std::fflush(stdout);
  spdlog::info("{}", text);
  if (there) {
    phase_ = Phase::claiming;
  } else if (layers_to_release_ > 0) {  // once the device has them
    const std::string told =
        fmt::format("the weights of {} stay on the device alone; their host memory goes to blocks",
                    counted(layers_to_release_, "layer"));
    fmt::print("{}\n", told);
    std::fflush(stdout);
    spdlog::info("{}", told);
    configure();
  } else {
    claim_pool();
  }
}

void Planner::claim_pool() {
  loader_->claim(region_bytes(block_sizes(control_->shape, control_->dtype), host_), host_);
  phase_ = Phase::claiming;
}

// The device holds the layers: the host need not.
void Planner::release_weights() {
  loader_->release_weights(layers_to_release_);
  phase_ = Phase::releasing;
}

// As find_profile chose; and where this planner takes over, as the last wish says, which may be why it
// does.
void Planner::choose_policy() {
  if (options_.takes_over) {
    choose_as_wished();
  }
  if (!policy_) {
    if (!options_.policy && !profile_ && policy_name_ == "optimal") {
      policy_name_ = "hybrid";  // which needs no costs
    }
    status_.policy = policy_name_;
    policy_ = make_policy_as({.policy = policy_name_,
                              .act_share = options_.policy_options.act_share,
                              .recompute_share = options_.policy_options.recompute_share});
  }
}

// The last wish, or where that cannot be fulfilled the one before that was.
void Planner::choose_as_wished() {
  const auto obey = [&](const PolicyWish& wish) {
    policy_ = make_policy_as(wish);
    status_.policy = wish.policy;
  };
  if (wishes_.changed()) {
    PolicyWish wish;
    try {
      wish = wishes_.read();
      obey(wish);
      untried_wish_ = wish;
      status_.policy_refusal.clear();
    } catch (const Failure& refusal) {
      refuse_wish(refusal);
    }
    status_.policy_serial = wish.serial;
  }
  if (const auto wish = wishes_.in_force(); wish && !policy_) {
    obey(*wish);
  }
}

void Planner::refuse_wish(const Failure& refusal) {
  spdlog::warn("a policy is refused: {}", refusal.what());
  status_.policy_refusal = refusal.what();
  untried_wish_.reset();
}

// True where the pool that is there does. A wish that came with this planner is in force once there is
// room for it; else it is refused, and all is made as before.
bool Planner::make_room_as_wished(bool device_is_host) {
  while (untried_wish_) {
    try {
      const bool there = make_room(device_is_host);
      wishes_.put_in_force(*untried_wish_);
      untried_wish_.reset();
      return there;
    } catch (const Failure& refusal) {
      refuse_wish(refusal);
      policy_.reset();
      choose_policy();  // a later wish may have come by now
    }
  }
  return make_room(device_is_host);
}

bool Planner::make_room(bool device_is_host) {
  demand_ = choose_demand(device_is_host);
  const bool there = take_over_pool(device_is_host);
  if (!there) {
    place_blocks(device_is_host);
  }
  return there;
}

RunDevice Planner::run_device(bool device_is_host) const {
  return {.cap = device_cap(),
          .overhead = executor_->greeting()->overhead,
          .is_host = device_is_host,
          .holds_blocks = !device_is_host || options_.gpu_memory.has_value()};
}

MoreRequests Planner::more_requests() const {
  const std::int64_t most = std::ssize(to_do_);
  if (demand_.sequences >= most) {
    return MoreRequests::none;
  }
  return demand_.sequences < std::min<std::int64_t>(most, options_.batch.max_num_seqs)
             ? MoreRequests::slower
             : MoreRequests::possible;
}

// How many requests are under way at a time, and what they ask for. A pool that is there may be
// replaced.
Demand Planner::choose_demand(bool device_is_host) const {
  const Demand most = demand_of(to_do_, options_.batch.max_num_seqs);
  if (!profile_) {
    return most;
  }
  const bool pool_is_there = control_->pool_epoch.load(std::memory_order_acquire) != 0;
  const Bytes pool{pool_is_there ? static_cast<std::int64_t>(control_->pool.region_bytes) *
                                       control_->shape.num_hidden_layers
                                 : 0};
  const Bytes gone =
      weight_layout(control_->shape, control_->dtype).layer.bytes * released_layers();
  const std::int32_t chosen = choose_concurrency(
      *policy_, *profile_, control_->shape, control_->dtype, most.sequences, sizes_of(to_do_),
      options_.batch,
      {.weights = Bytes{static_cast<std::int64_t>(control_->weights_bytes)} - gone,
       .available = available_host_memory() + pool,
       .host_memory = options_.host_memory},
      run_device(device_is_host));
  return demand_of(to_do_, chosen);
}

// How many blocks there are, where, and what the device's buffers hold. `pool`: in so many bytes,
// which are there already; `given_back`: what a new pool could have beside what is free.
void Planner::place_blocks(bool device_is_host, std::optional<Bytes> pool, Bytes given_back) {
  const std::int32_t released = released_layers();
  const Bytes gone = weight_layout(control_->shape, control_->dtype).layer.bytes * released;
  const MemoryPlan made = plan_memory(
      *policy_, control_->shape, control_->dtype, demand_, options_.batch,
      {.weights = Bytes{static_cast<std::int64_t>(control_->weights_bytes)} - gone,
       .available = available_host_memory() + given_back,
       .host_memory = options_.host_memory,
       .pool = pool},
      run_device(device_is_host), released > 0 ? std::optional(released) : std::nullopt);
  host_ = made.host;
  device_limits_ = made.device;
  device_overhead_ = made.overhead;
  layers_to_release_ = made.released_layers;
}

// Whose weights the executor's device holds and the host does not.
std::int32_t Planner::released_layers() const {
  return static_cast<std::int32_t>(control_->released_layers.load(std::memory_order_acquire));
}

Bytes Planner::device_cap() const {
  const Bytes all = executor_->greeting()->memory;
  return std::min(all, options_.gpu_memory.value_or(all));
}

bool Planner::configure() {
  if (loader_->grant()) {
    log_pool();
  }
  executor_->configure(device_limits_, device_cap(),
                       weight_layout(control_->shape, control_->dtype), options_.trace);
  phase_ = Phase::configuring;
  return true;
}

void Planner::begin_running() {
  if (!running_since_) {
    executor_->begin_balance();  // what was measured before is no part of the run
  }
  if (!scheduler_) {
    begin_scheduling();
  }
  if (profile_) {
    prediction_.emplace(*profile_, weight_layout(control_->shape, control_->dtype), device_limits_);
  }
  status_.executor_pid = executor_->greeting()->pid;
  status_.state = "running";
  phase_ = Phase::running;
  report(true);
}

}  // namespace poise
