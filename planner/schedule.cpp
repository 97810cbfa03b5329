#include "planner/schedule.h"

#include <algorithm>
#include <unordered_map>

#include "common/trouble.h"

namespace poise {

Scheduler::Scheduler(const Policy& policy, const Allocation& host, const ScheduleLimits& limits)
    : policy_(&policy),
      host_(host),
      limits_(limits),
      blocks_(host.act_blocks, host.kv_blocks, host.gpu_act_blocks, host.gpu_kv_blocks) {
  check(limits.max_num_seqs > 0 && limits.prefill_rows > 0 && limits.sequence_rows > 0,
        "an iteration has room for a request");
}

void Scheduler::add(const Request& request) {
  const UnderWay alone(request, *policy_);
  check(!request.prompt.empty() && alone.of_pools(alone.most_blocks) <= blocks_.total() &&
            alone.token_blocks * kBlockTokens < limits_.sequence_rows,
        "the pool holds the largest request");
  fresh_.push_back(&request);
}

std::span<const Part> Scheduler::next() {
  check(parts_.empty(), "an iteration is completed before the next is made");
  prefill_left_ = limits_.prefill_rows;
  const std::int64_t preemptions_before = preemptions_;
  bool all_went_on = true;
  for (std::size_t i = 0; i < running_.size(); ++i) {  // preemption shortens it from its end
    all_went_on = schedule(i) && all_went_on;
  }
  if (all_went_on && preemptions_ == preemptions_before) {
    most_blocks_ = known_blocks_ = 0;
    for (const auto& request : running_) {
      most_blocks_ += request->of_pools(request->most_blocks);
      known_blocks_ += request->of_pools(blocks_for(request->known()) + 1);
    }
    while (admit()) {
      schedule(running_.size() - 1);
    }
  }
  check(!parts_.empty() || idle(), "the oldest request always goes on");
  return parts_;
}

bool Scheduler::schedule(std::size_t index) {
  UnderWay& request = *running_[index];
  const std::int32_t stored = request.context.stored();
  const std::int32_t left = request.known() - stored;
  const std::int32_t again = std::min(stored, request.token_blocks * kBlockTokens);
  // A single row, the rule while generating, is outside the wave: there is room for one a request.
  std::int32_t rows = left;
  if (left > 1) {
    rows = std::min({left, prefill_left_, limits_.sequence_rows - again});
    if (rows == 0) {
      return true;  // the wave is full; it waits for its turn, not for blocks
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
  parts_.push_back({.request = &request, .context = stored, .new_tokens = rows, .again = again});
  return true;
}

void Scheduler::make_room(std::size_t index, std::int32_t tokens) {
  UnderWay& request = *running_[index];
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

std::optional<BlockRef> Scheduler::take_block(const UnderWay& request) {
  const ContextBlocks& context = request.context;
  if (context.size() < request.token_blocks) {
    return BlockRef{.kind = BlockKind::kv, .place = Place::nowhere, .number = {}};
  }
  const BlockKind kind =
      policy_->next_block(host_, {.act_blocks = context.count(BlockKind::act),
                                  .kv_blocks = context.count(BlockKind::kv),
                                  .most_blocks = request.of_pools(request.most_blocks)});
  return blocks_.take(kind, next_place(request, kind));
}

// Of the blocks that it may come to have, every request has the same share on the device, so that all
// mini-batches leave the link as much to do; and they are its first ones, so that the device is in
// use from the beginning.
Place Scheduler::next_place(const UnderWay& request, BlockKind kind) const {
  const std::int64_t here = kind == BlockKind::act ? host_.gpu_act_blocks : host_.gpu_kv_blocks;
  const std::int64_t all = host_.all_act_blocks() + host_.all_kv_blocks();
  const std::int64_t most = request.of_pools(request.most_blocks);
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
    resumed_.push_back(std::make_unique<UnderWay>(*fresh_.front(), *policy_));
    fresh_.pop_front();
  }
  if (!may_begin(*resumed_.front())) {
    return false;
  }
  const UnderWay& request = *resumed_.front();
  most_blocks_ += request.of_pools(request.most_blocks);
  known_blocks_ += request.of_pools(blocks_for(request.known()) + 1);
  running_.push_back(std::move(resumed_.front()));
  resumed_.pop_front();
  return true;
}

// Surely: all that run could grow to their ends beside it. Likely: there is room for what is known
// of every request and one more block each; answers often end before max_tokens.
bool Scheduler::may_begin(const UnderWay& request) const {
  return running_.empty() ||
         most_blocks_ + request.of_pools(request.most_blocks) <= blocks_.total() ||
         known_blocks_ + request.of_pools(blocks_for(request.known()) + 1) <= blocks_.total();
}

void Scheduler::complete(std::span<const Outcome> outcomes) {
  std::unordered_map<std::uint32_t, const Outcome*> by_request;
  by_request.reserve(outcomes.size());
  for (const Outcome& outcome : outcomes) {
    by_request.emplace(outcome.request.n, &outcome);
  }
  std::size_t used = 0, part = 0, kept = 0;
  for (auto& running : running_) {
    bool finished = false;
    if (part < parts_.size() && parts_[part].request == running.get()) {
      const auto found = by_request.find(running->request->id.n);
      const Outcome* outcome = found == by_request.end() ? nullptr : found->second;
      used += outcome != nullptr ? 1 : 0;
      finished = outcome != nullptr && !outcome->token;
      go_on(*running, parts_[part++], outcome);
    }
    if (finished) {
      running->context.give_back_all(blocks_);
    } else {
      std::swap(running_[kept++], running);
    }
  }
  check(part == parts_.size() && used == outcomes.size(), "outcomes are those of the iteration");
  running_.resize(kept);
  parts_.clear();
}

void Scheduler::go_on(UnderWay& request, const Part& ran, const Outcome* outcome) {
  check(ran.complete() ? outcome != nullptr : outcome == nullptr || !outcome->token,
        "a request that ran to its end has an outcome, another may only be finished");
  request.context.mark_stored(ran.new_tokens);
  request.prompt_values =
      std::max(request.prompt_values, std::min(request.context.stored(), request.prompt_size()));
  if (outcome != nullptr && outcome->token) {
    request.tokens.push_back(*outcome->token);
  }
}

void Scheduler::use(const Policy& policy, const Allocation& wished, const ScheduleLimits& limits) {
  check(parts_.empty(), "a policy changes between iterations");
  policy_ = &policy;
  host_ = wished;
  limits_ = limits;
  const auto follow = [&](UnderWay& request) {
    const std::int32_t token_blocks = policy.token_blocks(request.most_blocks);
    if (request.token_blocks > 0 && request.token_blocks != token_blocks) {
      request.context.give_back_all(blocks_);
    }
    if (request.context.size() == 0) {
      request.token_blocks = token_blocks;
    }
  };
  std::ranges::for_each(running_, follow, [](auto& request) -> UnderWay& { return *request; });
  std::ranges::for_each(resumed_, follow, [](auto& request) -> UnderWay& { return *request; });
}

void Scheduler::move_border(std::uint32_t act_blocks, std::uint32_t kv_blocks) {
  check(parts_.empty(), "a border moves between iterations");
  blocks_.set_limits(act_blocks, kv_blocks);
}

void Scheduler::abandon(bool device_lost) {
  parts_.clear();
  for (const auto& request : running_) {
    if (device_lost && request->context.on_gpu() > 0) {
      request->context.give_back_all(blocks_);
    } else {
      request->context.give_back_empty(blocks_);
    }
  }
}

std::vector<Scheduler::Begun> Scheduler::begun() const {
  check(parts_.empty(), "what has begun is told between iterations");
  std::vector<Begun> all;
  const auto tell = [&](const UnderWay& request, bool running) {
    all.push_back(
        {.request = request.request->id,
         .answered = {request.tokens.begin() + request.prompt_size(), request.tokens.end()},
         .prompt_values = request.prompt_values,
         .running = running,
         .stored = request.context.stored(),
         .token_blocks = request.token_blocks,
         .blocks = request.context.blocks()});
  };
  for (const auto& request : running_) {
    tell(*request, true);
  }
  for (const auto& request : resumed_) {
    tell(*request, false);
  }
  return all;
}

bool Scheduler::go_on_with(const Request& request, const Begun& begun) {
  auto under_way = std::make_unique<UnderWay>(request, *policy_);
  under_way->tokens.insert(under_way->tokens.end(), begun.answered.begin(), begun.answered.end());
  under_way->prompt_values = begun.prompt_values;
  if (begun.stored < 0 || begun.stored >= under_way->known() ||
      blocks_for(begun.stored) != static_cast<std::int32_t>(begun.blocks.size()) ||
      begun.prompt_values < 0 || begun.prompt_values > under_way->prompt_size() ||
      begun.token_blocks < 0 || (!begun.running && !begun.blocks.empty())) {
    return false;
  }
  under_way->token_blocks = begun.token_blocks;
  if (under_way->of_pools(under_way->most_blocks) > blocks_.total()) {
    return false;
  }
  if (!begun.running || running() >= limits_.max_num_seqs) {
    resumed_.push_back(std::move(under_way));
    return true;
  }
  for (const BlockRef& block : begun.blocks) {
    const bool nowhere = under_way->context.size() < begun.token_blocks;
    if (nowhere ? !(block == BlockRef{BlockKind::kv, Place::nowhere, {}}) : !blocks_.take(block)) {
      return false;
    }
    under_way->context.append(block);
  }
  under_way->context.mark_stored(begun.stored);
  running_.push_back(std::move(under_way));
  return true;
}

bool Scheduler::last_iteration() const {
  return waiting() == 0 && parts_.size() == running_.size() &&
         std::ranges::all_of(parts_, [](const Part& part) {
           const std::int32_t answered = part.request->answered() + (part.generates() ? 1 : 0);
           return part.complete() && answered >= part.request->request->sampling.max_tokens;
         });
}

std::vector<Outcome> any_outcomes(std::span<const Part> parts) {
  std::vector<Outcome> outcomes;
  for (const Part& part : parts) {
    if (part.complete()) {
      const Request& request = *part.request->request;
      const bool ends = part.request->answered() + 1 >= request.sampling.max_tokens;
      outcomes.push_back({request.id, ends ? std::nullopt : std::optional(TokenId{0})});
    }
  }
  return outcomes;
}

}  // namespace poise
