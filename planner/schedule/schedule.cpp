#include "planner/schedule/schedule.h"

#include <algorithm>
#include <unordered_map>

#include "common/trouble.h"
#include "common/windows/unseen_blocks.h"

namespace poise {
namespace {

// Of the sample behind the request's text, at most.
std::int64_t edits_of(const RunningRequest& request) {
  const LogitWishes* const wishes = request.request->sampling.wishes.get();
  return wishes != nullptr ? wishes->most_edits(request.answered()) : 0;
}

}  // namespace

Scheduler::Scheduler(const Policy& policy, const Allocation& host, const ScheduleLimits& limits)
    : policy_(&policy),
      host_(host),
      limits_(limits),
      blocks_(host.act_blocks, host.kv_blocks, host.gpu_act_blocks, host.gpu_kv_blocks) {
  check(limits.max_num_seqs > 0 && limits.prefill_rows > 0 && limits.sequence_rows > 0,
        "an iteration has room for a request");
}

void Scheduler::add(const Request& request) {
  const RunningRequest alone(request, *policy_);
  check(!request.prompt.empty() && most_of_pools(alone) <= blocks_.total() &&
            alone.token_blocks * kBlockTokens < limits_.sequence_rows,
        "the pool holds the largest request");
  fresh_.push_back(&request);
}

std::span<const ScheduledChunk> Scheduler::next(std::span<const RequestId> only) {
  check(chunks_.empty(), "an iteration is completed before the next is made");
  prefill_left_ = limits_.prefill_rows;
  edits_ = 0;
  const std::int64_t preemptions_before = preemptions_;
  const auto may_run = [&](std::size_t index) {
    return only.empty() || std::ranges::find(only, running_[index]->request->id) != only.end();
  };
  bool all_went_on = true;
  for (std::size_t i = 0; i < running_.size(); ++i) {  // preemption shortens it from its end
    all_went_on = (!may_run(i) || schedule(i)) && all_went_on;
  }
  if (all_went_on && preemptions_ == preemptions_before) {
    need_ = {};
    for (const auto& request : running_) {
      need_ += need_of(*request);
    }
    while (admit()) {
      if (may_run(running_.size() - 1)) {
        schedule(running_.size() - 1);
      }
    }
  }
  check(!chunks_.empty() || idle() || !only.empty(), "the oldest request always goes on");
  return chunks_;
}

bool Scheduler::schedule(std::size_t index) {
  RunningRequest& request = *running_[index];
  const std::int64_t edits = edits_of(request);
  if (edits > 0 && edits_ > 0 && edits_ + edits > limits_.edits) {
    return true;  // as where no prefill rows are left
  }
  const std::int32_t stored = request.context.stored();
  const std::int32_t unstored = request.known() - stored;
  const std::int32_t left = std::min(unstored, request.context.gap().value_or(unstored));
  const std::int32_t recompute = std::min(stored, request.token_blocks * kBlockTokens);
  // A single row, the rule while generating, is no prefill: every request has room for one.
  std::int32_t rows = left;
  if (left > 1) {
    rows = std::min({left, prefill_left_, limits_.sequence_rows - recompute});
    rows = request.token_blocks > 0 ? rows : std::min(rows, limits_.kept.rows_at_once());
    if (rows == 0) {
      return true;  // no prefill rows are left; it waits for its turn, not for blocks
    }
  }
  make_room(index, stored + rows);
  rows = std::min(rows, request.context.room() - stored);
  if (rows == 0) {
    return false;
  }
  if (left > 1) {
    prefill_left_ -= rows;
  }
  const ContextBlocks& context = request.context;
  const bool on_host = left == 1 && stored > 0 && wants_host(request) &&
                       context.count(BlockKind::kv, Place::host) + context.dropped() ==
                           context.size();
  chunks_.push_back({.request = &request,
                     .context = stored,
                     .new_tokens = rows,
                     .recompute_rows = recompute,
                     .on_host = on_host});
  edits_ += chunks_.back().generates() ? edits : 0;
  return true;
}

void Scheduler::make_room(std::size_t index, std::int32_t tokens) {
  RunningRequest& request = *running_[index];
  while (request.context.room() < tokens) {
    if (const auto block = take_block(request)) {
      request.context.append(*block);
    } else if (index + 1 < running_.size()) {
      preempt_youngest();
    } else {
      return;
    }
  }
}

std::optional<BlockRef> Scheduler::take_block(const RunningRequest& request) {
  const ContextBlocks& context = request.context;
  if (context.size() < request.token_blocks) {
    return BlockRef{.kind = BlockKind::kv, .place = Place::nowhere, .number = {}};
  }
  if (wants_host(request)) {
    return blocks_.take(BlockKind::kv, Place::host);
  }
  const BlockKind kind =
      policy_->next_block(host_, {.act_blocks = context.count(BlockKind::act),
                                  .kv_blocks = context.count(BlockKind::kv),
                                  .most_blocks = most_of_pools(request)});
  return blocks_.take(kind, next_place(request, kind));
}

// Every request has the same share of its blocks on the device, so that all mini-batches leave the same
// work to the link. They are its first blocks, so that the device is in use from the
// beginning.
Place Scheduler::next_place(const RunningRequest& request, BlockKind kind) const {
  const std::int64_t here = kind == BlockKind::act ? host_.gpu_act_blocks : host_.gpu_kv_blocks;
  const std::int64_t all = host_.all_act_blocks() + host_.device_kv_blocks();
  const std::int64_t most = most_of_pools(request);
  // One more lies nearer to the share than none: (count + 1/2) / most <= here / all.
  const bool room = (2 * request.context.count(kind, Place::gpu) + 1) * all <= 2 * here * most;
  return here > 0 && room ? Place::gpu : Place::host;
}

void Scheduler::preempt_youngest() {
  running_.back()->context.give_back_all(blocks_);
  resumed_.push_front(std::move(running_.back()));
  running_.pop_back();
  ++preemptions_;
}

bool Scheduler::admit() {
  if (running() >= limits_.max_num_seqs || waiting() == 0 || prefill_left_ == 0) {
    return false;
  }
  if (resumed_.empty()) {
    resumed_.push_back(std::make_unique<RunningRequest>(*fresh_.front(), *policy_));
    fresh_.pop_front();
  }
  if (!may_begin(*resumed_.front())) {
    return false;
  }
  need_ += need_of(*resumed_.front());
  running_.push_back(std::move(resumed_.front()));
  resumed_.pop_front();
  return true;
}

Scheduler::Need& Scheduler::Need::operator+=(const Need& more) {
  most += more.most;
  known += more.known;
  beside += more.beside;
  return *this;
}

Scheduler::Need Scheduler::need_of(const RunningRequest& request) const {
  const KeptContext& kept = limits_.kept;
  return {.most = most_of_pools(request),
          .known = request.of_pools(blocks_for(request.known()) + 1, kept),
          .beside = request.token_blocks > 0
                        ? 0
                        : kept.at_most(request.most_blocks) - kept.between(request.most_blocks)};
}

// Surely: all running requests can grow to their ends beside it. Likely: there is room for every
// request's present text and one more block each; answers often end before max_tokens.
bool Scheduler::may_begin(const RunningRequest& request) const {
  Need all = need_;
  all += need_of(request);
  const std::int64_t room =
      blocks_.total() - std::min(all.beside, limits_.kept.beside(limits_.prefill_rows));
  return running_.empty() || all.most <= room || all.known <= room;
}

void Scheduler::complete(std::span<const Outcome> outcomes) {
  std::unordered_map<std::uint32_t, const Outcome*> by_request;
  by_request.reserve(outcomes.size());
  for (const Outcome& outcome : outcomes) {
    by_request.emplace(outcome.request.n, &outcome);
  }
  std::size_t used = 0, chunk = 0, kept = 0;
  for (auto& running : running_) {
    bool finished = false;
    if (chunk < chunks_.size() && chunks_[chunk].request == running.get()) {
      const auto found = by_request.find(running->request->id.n);
      const Outcome* outcome = found == by_request.end() ? nullptr : found->second;
      used += outcome != nullptr ? 1 : 0;
      finished = outcome != nullptr && !outcome->token;
      go_on(*running, chunks_[chunk++], outcome);
    }
    if (finished) {
      running->context.give_back_all(blocks_);
    } else {
      drop_unseen(*running);
      std::swap(running_[kept++], running);
    }
  }
  check(chunk == chunks_.size() && used == outcomes.size(), "outcomes are those of the iteration");
  running_.resize(kept);
  chunks_.clear();
}

void Scheduler::go_on(RunningRequest& request, const ScheduledChunk& ran, const Outcome* outcome) {
  check(ran.complete() ? outcome != nullptr : outcome == nullptr || !outcome->token,
        "a request that ran to its end has an outcome, another may only be finished");
  request.context.mark_stored(ran.new_tokens);
  request.prompt_values =
      std::max(request.prompt_values, std::min(request.context.stored(), request.prompt_size()));
  if (outcome != nullptr && outcome->token) {
    request.answer.push_back(*outcome->token);
  }
}

void Scheduler::drop_unseen(RunningRequest& request) {
  if (limits_.kept.window > 0 && request.token_blocks == 0) {
    ContextBlocks& context = request.context;
    context.drop(unseen_blocks(context.stored(), limits_.kept.window), blocks_);
  }
}

// Without a window in the limits it is not known what is seen: everything is.
void Scheduler::begin_again_if_needed(RunningRequest& request) {
  ContextBlocks& context = request.context;
  if (!context.lost().empty() &&
      unseen_blocks(context.stored(), limits_.kept.window) < context.dropped()) {
    context.give_back_all(blocks_);
  }
}

void Scheduler::use(const Policy& policy, const Allocation& wished, const ScheduleLimits& limits) {
  check(chunks_.empty(), "a policy changes between iterations");
  policy_ = &policy;
  host_ = wished;
  limits_ = limits;
  blocks_.set_limits(wished.gpu_act_blocks, wished.gpu_kv_blocks, Place::gpu);
  const auto follow = [&](RunningRequest& request) {
    const std::int32_t token_blocks = policy.token_blocks(request.most_blocks);
    if (request.token_blocks > 0 && request.token_blocks != token_blocks) {
      request.context.give_back_all(blocks_);
    }
    if (request.context.size() == 0) {
      request.token_blocks = token_blocks;
    }
    drop_unseen(request);
  };
  std::ranges::for_each(running_, follow,
                        [](auto& request) -> RunningRequest& { return *request; });
  std::ranges::for_each(resumed_, follow,
                        [](auto& request) -> RunningRequest& { return *request; });
}

void Scheduler::move_border(std::uint32_t act_blocks, std::uint32_t kv_blocks) {
  check(chunks_.empty(), "a border moves between iterations");
  blocks_.set_limits(act_blocks, kv_blocks);
}

void Scheduler::remove(RequestId request) {
  check(chunks_.empty(), "a request is taken out between iterations");
  const auto is_it = [&](const auto& one) { return one->request->id == request; };
  const auto running = std::ranges::find_if(running_, is_it);
  if (running != running_.end()) {
    (*running)->context.give_back_all(blocks_);
    running_.erase(running);
  }
  std::erase_if(resumed_, is_it);  // these have no blocks
  std::erase_if(fresh_, [&](const Request* one) { return one->id == request; });
}

void Scheduler::abandon(bool device_lost) {
  chunks_.clear();
  for (const auto& request : running_) {
    if (device_lost) {
      request->context.lose_device();
      begin_again_if_needed(*request);
    }
    request->context.give_back_empty(blocks_);
  }
}

std::vector<Scheduler::Snapshot> Scheduler::snapshots() const {
  check(chunks_.empty(), "what has begun is told between iterations");
  std::vector<Snapshot> all;
  const auto snapshot = [&](const RunningRequest& request, bool running) {
    all.push_back({.request = request.request->id,
                   .answer = request.answer,
                   .prompt_values = request.prompt_values,
                   .running = running,
                   .stored = request.context.ever_stored(),
                   .token_blocks = request.token_blocks,
                   .blocks = request.context.blocks(),
                   .lost = request.context.lost()});
  };
  for (const auto& request : running_) {
    snapshot(*request, true);
  }
  for (const auto& request : resumed_) {
    snapshot(*request, false);
  }
  return all;
}

bool Scheduler::restore(const Request& request, const Snapshot& begun) {
  auto restored = std::make_unique<RunningRequest>(request, *policy_);
  restored->answer = begun.answer;
  restored->prompt_values = begun.prompt_values;
  if (begun.stored < 0 || begun.stored >= restored->known() ||
      blocks_for(begun.stored) != static_cast<std::int32_t>(begun.blocks.size()) ||
      begun.prompt_values < 0 || begun.prompt_values > restored->prompt_size() ||
      begun.token_blocks < 0 || (!begun.running && !begun.blocks.empty())) {
    return false;
  }
  restored->token_blocks = begun.token_blocks;
  if (most_of_pools(*restored) > blocks_.total()) {
    return false;
  }
  if (!begun.running || running() >= limits_.max_num_seqs) {
    resumed_.push_back(std::move(restored));
    return true;
  }
  for (const BlockRef& block : begun.blocks) {
    const ContextBlocks& before = restored->context;
    const bool nowhere = before.size() < begun.token_blocks;
    const bool dropped = begun.token_blocks == 0 && before.size() == before.dropped() &&
                         block == BlockRef{BlockKind::kv, Place::dropped, {}} &&
                         (before.size() + 1) * kBlockTokens <= begun.stored;
    if (nowhere ? !(block == BlockRef{BlockKind::kv, Place::nowhere, {}})
                : !dropped && !blocks_.take(block)) {
      return false;
    }
    restored->context.append(block);
  }
  if (!std::ranges::is_sorted(begun.lost) ||
      (!begun.lost.empty() &&
       (begun.lost.back() >= begun.blocks.size() ||
        begun.lost.front() < static_cast<std::uint32_t>(restored->context.dropped())))) {
    return false;
  }
  restored->context.restore(begun.stored, begun.lost);
  begin_again_if_needed(*restored);
  drop_unseen(*restored);
  running_.push_back(std::move(restored));
  return true;
}

bool Scheduler::last_iteration() const {
  return waiting() == 0 && chunks_.size() == running_.size() &&
         std::ranges::all_of(chunks_, [](const ScheduledChunk& chunk) {
           const std::int32_t answered = chunk.request->answered() + (chunk.generates() ? 1 : 0);
           return chunk.complete() && answered >= chunk.request->request->sampling.max_tokens;
         });
}

std::vector<Outcome> any_outcomes(std::span<const ScheduledChunk> chunks) {
  std::vector<Outcome> outcomes;
  for (const ScheduledChunk& chunk : chunks) {
    if (chunk.complete()) {
      const Request& request = *chunk.request->request;
      const bool ends = chunk.request->answered() + 1 >= request.sampling.max_tokens;
      outcomes.push_back({request.id, ends ? std::nullopt : std::optional(TokenId{0})});
    }
  }
  return outcomes;
}

}  // namespace poise
