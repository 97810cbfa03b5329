// What may change between two iterations of a planner's run: the policy and with it the border of
// the pool and the device's buffers; the executor, when it was started anew; and the planner itself,
// which hands over to the next or takes over from the one before.

#include <fmt/core.h>
#include <spdlog/spdlog.h>

#include <unordered_map>

#include "common/sha256.h"
#include "common/trouble.h"
#include "common/words.h"
#include "planner/links/announce.h"
#include "planner/links/clock.h"
#include "planner/process/planner.h"
#include "planner/record/log_note.h"

namespace poise {
namespace {

constexpr Seconds kLoaderWait{0.1};    // for the loader, where nothing else is to be done
constexpr Seconds kBorderRests{0.02};  // between two moves of the border

}  // namespace

std::unique_ptr<Policy> Planner::make_policy_as(const PolicyWish& wish) const {
  PolicyOptions options = options_.policy_options;
  options.act_share = wish.act_share;
  options.recompute_share = wish.recompute_share;
  options.profile = wish.machine
                        ? std::make_shared<const Profile>(profile_of(
                              machine_named(*wish.machine), control_->shape, control_->dtype))
                        : profile_;
  return make_policy(wish.policy, options);
}

FixedResources Planner::fixed_resources() const {
  return {
      .shape = control_->shape,
      .dtype = control_->dtype,
      .demand = demand_,
      .batch = options_.batch,
      .pool = loader_->grant()->partition,
      .gpu_act_blocks = host_.gpu_act_blocks,
      .gpu_kv_blocks = host_.gpu_kv_blocks,
      .overhead = device_overhead_,
      .cap = device_cap(),
      .resident_layers = released_layers() > 0 ? std::optional(released_layers()) : std::nullopt};
}

// ---- between two iterations

// Waits a moment for a border that the loader moves; true where it is not, or not any more, under way.
bool Planner::border_rests() {
  if (loader_->settled()) {
    return true;
  }
  loader_->step(kLoaderWait);
  if (!loader_->settled()) {
    return false;
  }
  const PoolPartition& pool = loader_->grant()->partition;
  scheduler_->move_border(pool.act_blocks, pool.kv_blocks);
  status_.act_blocks = pool.act_blocks;
  status_.kv_blocks = pool.kv_blocks;
  log_pool();
  return true;
}

// True where the next iteration may be planned; else something is under way first. REQUIRES: the border
// rests.
bool Planner::settle() {
  if (wishes_.changed()) {
    obey_wish();
  }
  return phase_ == Phase::running && !move_border() && phase_ == Phase::running;
}

// A wish that cannot be fulfilled is answered with the reason, and all goes on as it was.
void Planner::obey_wish() {
  PolicyWish wish;
  std::unique_ptr<Policy> policy;
  SwapPlan plan;
  try {
    wish = wishes_.read();
    policy = make_policy_as(wish);
    plan = plan_swap(*policy, fixed_resources());
    status_.policy_refusal.clear();
  } catch (const Failure& refusal) {
    refuse_wish(refusal);
  }
  status_.policy_serial = wish.serial;
  if (status_.policy_refusal.empty()) {
    const bool fits = suffices(device_limits_, plan.device);
    host_ = plan.wished;
    device_limits_ = fits ? device_limits_ : plan.device;
    use_policy(std::move(policy));
    border_moves_ = true;
    if (!fits) {
      configure();
    }
    wishes_.put_in_force(wish);
    status_.policy = wish.policy;
    status_.policy_since = iteration_ + 1;
    log_policy();
    announce(fmt::format("policy {} from iteration {} on: {} ACT and {} are wished on the host",
                         wish.policy, iteration_ + 1, host_.act_blocks,
                         counted(host_.kv_blocks, "KV block")));
  }
  status_.answer_wish();
  report(true);
}

void Planner::use_policy(std::unique_ptr<Policy> policy) {
  pack_limits_ = pack_limits(options_.batch, device_limits_);
  scheduler_->use(*policy, host_, schedule_limits(demand_, host_, device_limits_));
  policy_ = std::move(policy);
}

void Planner::log_policy() {
  messages::PolicyInForceT note;
  note.iteration = iteration_ + 1;
  note.policy = status_.policy;
  note.act_blocks = host_.act_blocks;
  note.kv_blocks = host_.kv_blocks;
  log_note(*order_log_, options_.run_id, std::move(note));
}

void Planner::log_pool() {
  const LoaderLink::Grant& grant = *loader_->grant();
  messages::PoolGrantT note;
  note.granted = true;
  note.pool_epoch = grant.pool_epoch;
  note.region_bytes = grant.partition.region_bytes;
  note.act_blocks = grant.partition.act_blocks;
  note.kv_blocks = grant.partition.kv_blocks;
  log_note(*order_log_, options_.run_id, std::move(note));
}

// As far towards the policy's split as free blocks allow; true where that is under way now.
bool Planner::move_border() {
  if (!border_moves_) {
    return false;
  }
  const PoolPartition& now = loader_->grant()->partition;
  if (now.act_blocks == host_.act_blocks && now.kv_blocks == host_.kv_blocks) {
    border_moves_ = false;
    const SwapPlan plan = plan_swap(*policy_, fixed_resources());
    if (plan.device !=
        device_limits_) {  // buffers for the blocks of before are not needed any more
      device_limits_ = plan.device;
      pack_limits_ = pack_limits(options_.batch, device_limits_);
      scheduler_->use(*policy_, host_, schedule_limits(demand_, host_, device_limits_));
      configure();
    }
    return false;
  }
  const Seconds time = monotonic_now();
  if (time - border_moved_ < kBorderRests) {
    return false;
  }
  // Where tokens are kept nowhere, a pool may hold less than the largest request.
  const std::int64_t least =
      std::min<std::int64_t>(demand_.largest_request, scheduler_->blocks().total());
  const PoolPartition next = border_toward(now, host_, scheduler_->blocks(),
                                           block_sizes(control_->shape, control_->dtype), least);
  if (next.act_blocks == now.act_blocks && next.kv_blocks == now.kv_blocks) {
    return false;
  }
  border_moved_ = time;
  loader_->move_border(next.act_blocks, next.kv_blocks);
  return true;
}

// ---- from planner to planner

Journal Planner::journal_of_now() const {
  const std::uint64_t epoch = control_->pool_epoch.load(std::memory_order_acquire);
  return {.run_id = options_.run_id,
          .build = build_id(),
          .model = to_hex(std::to_array(control_->fingerprint)),
          .input = input_.requests.digest,
          .pool_epoch = epoch,
          .partition = control_->pool,
          .gpu_act_blocks = host_.gpu_act_blocks,
          .gpu_kv_blocks = host_.gpu_kv_blocks,
          .executor = executor_ && executor_->greeting() ? executor_->greeting()->epoch : 0,
          .iteration = iteration_,
          .prompt_tokens = status_.prompt_tokens,
          .generated_tokens = status_.generated_tokens,
          .preemptions = scheduler_ ? preemptions_before_ + scheduler_->preemptions() : 0,
          .elapsed = running_since_ ? (monotonic_now() - *running_since_).n : 0,
          .requests = {},
          .answers = {}};
}

// Loader and executor stay; so do the pool and all that lies in it.
void Planner::hand_over() {
  if (scheduler_) {
    results_->sync();
    Journal journal = journal_of_now();
    journal.requests = scheduler_->snapshots();
    journal.answers = answers_->snapshots();
    try {
      write_journal(options_.run_dir, journal);
    } catch (
        const Failure& failure) {  // a full disk, say: less is lost without one than with the run
      announce(fmt::format("{}; what was under way is computed again", failure.what()));
    }
    report(true);
  }
  if (order_log_) {
    order_log_->flush();
  }
  spdlog::info("handed over before iteration {}", iteration_ + 1);
  outcome_ = Exit::handed_over;
  phase_ = Phase::over;
}

// What the planner before left, if all of it can be believed; the rest is computed again.
void Planner::read_journal() {
  if (!journal_exists(options_.run_dir)) {
    return;
  }
  try {
    Journal journal = take_journal(options_.run_dir);
    if (!options_.takes_over) {
      return;  // of a run that ended in between: its pool is gone
    }
    check_same_work(journal, journal_of_now());
    journal_ = std::move(journal);
  } catch (const Failure& failure) {
    announce(fmt::format("{}; what was under way is computed again", failure.what()));
  }
}

// The pool that is there, with what lies in it where a journal says what that is. False: another one
// must be claimed.
bool Planner::take_over_pool(bool device_is_host) {
  const std::uint64_t epoch = control_->pool_epoch.load(std::memory_order_acquire);
  if (!options_.takes_over || epoch == 0) {
    if (journal_) {
      lose_blocks(*journal_, Lost::everything);
    }
    return false;
  }
  const PoolPartition pool = control_->pool;
  const Bytes bytes{static_cast<std::int64_t>(pool.region_bytes) *
                    control_->shape.num_hidden_layers};
  loader_->take_over({.pool_epoch = epoch, .partition = pool});
  if (journal_) {
    try {
      host_ = {};
      host_.gpu_act_blocks = journal_->gpu_act_blocks;
      host_.gpu_kv_blocks = journal_->gpu_kv_blocks;
      device_overhead_ =
          executor_->greeting()->overhead + (device_is_host ? Bytes{0} : page_tables_of(bytes));
      const SwapPlan plan = plan_swap(*policy_, fixed_resources());
      host_ = plan.wished;
      device_limits_ = plan.device;
      border_moves_ = true;
      return true;
    } catch (const Failure& failure) {
      if (untried_wish_) {  // with another policy, what is under way can be kept
        throw;
      }
      announce(fmt::format("{}; what was under way is computed again", failure.what()));
      journal_.reset();
    }
  }
  try {
    // One that is far too small is not this run's (it was made to measure costs), or of no use.
    place_blocks(device_is_host, std::nullopt, bytes);
    if (region_bytes(block_sizes(control_->shape, control_->dtype), host_) / 2 >
        pool.region_bytes) {
      loader_->forget_grant();
      return false;
    }
    place_blocks(device_is_host, bytes);
  } catch (const Failure& failure) {
    spdlog::warn("the pool that is there does not do: {}", failure.what());
    loader_->forget_grant();
    return false;
  }
  loader_->move_border(host_.act_blocks, host_.kv_blocks);
  return true;
}

// Requests that had begun, as the journal has them. False, and nothing has begun, where it
// contradicts itself.
bool Planner::restore(const Journal& journal) {
  std::unordered_map<std::uint32_t, const Request*> by_line;
  for (const Request* request : to_do_) {
    by_line.emplace(request->id.n, request);
  }
  for (const Scheduler::Snapshot& begun : journal.requests) {
    const auto found = by_line.find(begun.request.n);
    if (found == by_line.end() || !scheduler_->restore(*found->second, begun)) {
      return false;
    }
  }
  std::unordered_map<std::uint32_t, std::size_t> answered;
  std::int64_t tokens = 0;
  for (const AnswerBook::Snapshot& begun : journal.answers) {
    const auto found = by_line.find(begun.request.n);
    if (found == by_line.end() || !answers_->restore(*found->second, begun)) {
      return false;
    }
    answered[begun.request.n] = begun.tokens.size();
    tokens += static_cast<std::int64_t>(begun.tokens.size());
  }
  for (const Scheduler::Snapshot& begun : journal.requests) {
    if (answered[begun.request.n] != begun.answered.size()) {
      return false;
    }
  }
  status_.tokens_left -= tokens;
  iteration_ = journal.iteration;
  preemptions_before_ = journal.preemptions;
  status_.prompt_tokens = journal.prompt_tokens;
  status_.generated_tokens = journal.generated_tokens;
  running_since_ = monotonic_now() - Seconds{journal.elapsed};
  return true;
}

void Planner::begin_scheduling() {
  const PoolPartition& pool = loader_->grant()->partition;
  const BlockSizes sizes = block_sizes(control_->shape, control_->dtype);
  const ScheduleLimits limits = schedule_limits(demand_, host_, device_limits_);
  // As many of each kind as there could be: the border moves.
  const auto most = [&](BlockKind kind) {
    return static_cast<std::uint32_t>(pool.region_bytes /
                                      static_cast<std::uint64_t>(sizes.block(kind).n));
  };
  order_tables_ = std::make_unique<OrderTables>(Allocation{.act_blocks = most(BlockKind::act),
                                                           .kv_blocks = most(BlockKind::kv),
                                                           .gpu_act_blocks = host_.gpu_act_blocks,
                                                           .gpu_kv_blocks = host_.gpu_kv_blocks});
  const auto begin_anew = [&] {
    scheduler_ = std::make_unique<Scheduler>(*policy_,
                                             Allocation{.act_blocks = pool.act_blocks,
                                                        .kv_blocks = pool.kv_blocks,
                                                        .gpu_act_blocks = host_.gpu_act_blocks,
                                                        .gpu_kv_blocks = host_.gpu_kv_blocks},
                                             limits);
    answers_ = std::make_unique<AnswerBook>(input_.tokenizer.get(), input_.model.eos,
                                            options_.served_model_name);
  };
  begin_anew();
  const bool first = !running_since_;
  running_since_ = monotonic_now();
  if (journal_ && journal_->executor != executor_->greeting()->epoch) {  // it is another by now
    lose_blocks(*journal_, Lost::device);
  }
  if (journal_ && !restore(*journal_)) {
    announce("the journal contradicts itself; what was under way is computed again");
    journal_.reset();
    begin_anew();
  }
  scheduler_->use(*policy_, host_, limits);
  std::size_t begun = 0;
  std::vector<bool> has_begun;
  for (const Scheduler::Snapshot& one :
       journal_ ? journal_->requests : std::vector<Scheduler::Snapshot>{}) {
    has_begun.resize(std::max<std::size_t>(has_begun.size(), one.request.n + 1));
    has_begun[one.request.n] = true;
    ++begun;
  }
  for (const Request* request : to_do_) {
    if (request->id.n >= has_begun.size() || !has_begun[request->id.n]) {
      scheduler_->add(*request);
    }
  }
  if (options_.takes_over && first) {
    status_.policy_since = iteration_ + 1;
    if (status_.policy_serial != 0) {
      status_.answer_wish();
    }
    announce(
        fmt::format("a planner took over before iteration {}: it goes on with {} and begins {}",
                    iteration_ + 1, counted(begun, "request"), to_do_.size() - begun));
  }
  journal_.reset();
  log_policy();
}

}  // namespace poise
