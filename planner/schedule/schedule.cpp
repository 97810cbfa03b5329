#include "planner/schedule/schedule.h"

#include <algorithm>
#include <set>
#include <unordered_map>
#include <utility>

#include "common/trouble.h"
#include "common/windows/unseen_blocks.h"

namespace poise {
namespace {

constexpr std::int64_t kFewGenerate = 8;  // less than this part of the requests that may be under way

// Of the tokens whose rows are others', those that no order has named yet.
std::int64_t ids_of(const RunningRequest& request) {
  const std::int32_t most = std::min(request.context.stored(), request.prompt_size());
  return std::max(0, most - request.prefix.told);
}

// Of the sample behind the request's text, at most.
std::int64_t edits_of(const RunningRequest& request) {
  const LogitWishes* const wishes = request.request->sampling.wishes.get();
  return wishes != nullptr ? wishes->most_edits(request.answered()) : 0;
}

// Rows at the beginning of a request that it need not run itself. The last one of its text it runs in any case, and
// those behind which the prompt's values are still to be told.
std::int32_t most_shared(const RunningRequest& running) {
  const Request& request = *running.request;
  std::int32_t most = std::min(running.prompt_size(), running.known() - 1);
  if (request.sampling.prompt_logprobs()) {
    const auto first = static_cast<std::int32_t>(request.first_valued()) - 1;
    // One that ends with its prompt leaves its beginning to others, however far it is itself.
    const bool ends = request.sampling.max_tokens == 0;
    most = std::min(most, ends ? first : std::max(first, running.prompt_values));
  }
  return most;
}

SharedPart part_of(const RunningRequest& request, const ScheduleLimits& limits) {
  const std::int32_t most = most_shared(request);
  return {.prompt = request.request->prompt.get(),
          .most_tokens = most,
          .ends = request.request->sampling.max_tokens == 0,
          .at_once = request.known() - most <= std::min({limits.prefill_rows, limits.prompt_rows,
                                                         limits.sequence_rows})};
}

bool is_taken(const BlockPools& pools, const BlockRef& block) {
  return (block.place == Place::host || block.place == Place::gpu) &&
         pools.pool(block.kind, block.place).is_taken(block.number);
}

BlockNeed need_of(const RunningRequest& request, const KeptContext& kept) {
  return {.most = request.most_of_pools(kept),
          .known = request.of_pools(blocks_for(request.known()) + 1, kept),
          .beside = request.token_blocks > 0
                        ? 0
                        : kept.at_most(request.most_blocks) - kept.between(request.most_blocks)};
}

// Every request has the same share of its blocks on the device, so that all mini-batches leave the same
// work to the link. They are its first blocks, so that the device is in use from the
// beginning.
Place next_place(const RunningRequest& request, BlockKind kind, const Allocation& host,
                 const KeptContext& kept) {
  const std::int64_t here = kind == BlockKind::act ? host.gpu_act_blocks : host.gpu_kv_blocks;
  const std::int64_t all = host.all_act_blocks() + host.device_kv_blocks();
  const std::int64_t most = request.most_of_pools(kept);
  // One more lies nearer to the share than none: (count + 1/2) / most <= here / all.
  const bool room = (2 * request.context.count(kind, Place::gpu) + 1) * all <= 2 * here * most;
  return here > 0 && room ? Place::gpu : Place::host;
}

void go_on(RunningRequest& request, const ScheduledChunk& ran, const Outcome* outcome) {
  check(ran.complete() ? outcome != nullptr : outcome == nullptr || !outcome->token,
        "a request that ran to its end has an outcome, another may only be finished");
  request.context.mark_stored(ran.new_tokens);
  request.prefix.told = std::max(request.prefix.told, request.context.stored());
  request.prompt_values =
      std::max(request.prompt_values, std::min(request.context.stored(), request.prompt_size()));
  if (outcome != nullptr && outcome->token) {
    request.answer.push_back(*outcome->token);
  }
}

// In the next iteration, at most. Where few generate, link and device both wait for prompts.
std::int32_t rows_of_prompts(std::span<const std::unique_ptr<RunningRequest>> running,
                             const ScheduleLimits& limits) {
  const auto generating = std::ranges::count_if(running, [](const auto& request) {
    return request->known() - request->context.stored() == 1;
  });
  return generating * kFewGenerate >= limits.max_num_seqs
             ? std::min(limits.prefill_rows, limits.prompt_rows)
             : limits.prefill_rows;
}

}  // namespace

BlockNeed& BlockNeed::operator+=(const BlockNeed& more) {
  most += more.most;
  known += more.known;
  beside += more.beside;
  return *this;
}

Scheduler::Scheduler(const Policy& policy, const Allocation& host, const ScheduleLimits& limits)
    : policy_(&policy),
      host_(host),
      limits_(limits),
      blocks_(host.act_blocks, host.kv_blocks, host.gpu_act_blocks, host.gpu_kv_blocks) {
  check(limits.max_num_seqs > 0 && limits.prefill_rows > 0 && limits.prompt_rows > 0 &&
            limits.sequence_rows > 0,
        "an iteration has room for a request");
}

void Scheduler::add(const Request& request) {
  const RunningRequest alone(request, *policy_);
  check(!request.prompt.empty() && alone.most_of_pools(limits_.kept) <= blocks_.total() &&
            alone.token_blocks * kBlockTokens < limits_.sequence_rows,
        "the pool holds the largest request");
  fresh_.push_back(&request);
}

std::span<const ScheduledChunk> Scheduler::next(std::span<const RequestId> only) {
  check(chunks_.empty(), "an iteration is completed before the next is made");
  prefill_left_ = rows_of_prompts(running_, limits_);
  order_ = {};
  prefixes_.begin_iteration();
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
      need_ += need_of(*request, limits_.kept);
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
  if (edits > 0 && order_.edits > 0 && order_.edits + edits > limits_.edits) {
    return true;  // as where no prefill rows are left
  }
  if (!share_prefix(request)) {
    return true;  // as where no prefill rows are left
  }
  const std::int64_t taken_over = ids_of(request);
  if (taken_over > 0 && order_.taken_over > 0 && order_.taken_over + taken_over > limits_.taken_over) {
    return true;  // likewise
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
    if (rows == 0 || (request.prefix.has_part && rows < left)) {
      return true;  // no prefill rows are left; it waits for its turn, not for blocks
    }
  }
  make_room(index, stored + rows);
  const bool has_part = request.prefix.has_part;
  rows = std::min(rows, request.context.room() - stored);
  if (rows == 0 || (has_part && rows < left)) {
    return false;
  }
  if (left > 1) {
    prefill_left_ -= rows;
  }
  const ContextBlocks& context = request.context;
  const bool on_host = left == 1 && stored > 0 && attended_on_host(host_, request.request->id) &&
                       context.count(BlockKind::kv, Place::host) + context.dropped() ==
                           context.size() &&
                       !blocks_.shares_any(context.blocks());
  chunks_.push_back({.request = &request,
                     .context = stored,
                     .new_tokens = rows,
                     .recompute_rows = recompute,
                     .on_host = on_host,
                     .taken_over_from = std::min(stored, request.prefix.told),
                     .stored_from = has_part ? blocks_for(stored) * kBlockTokens : stored});
  if (shares_prefix(request) && stored < request.prompt_size()) {
    prefixes_.runs(part_of(request, limits_), request.prefix, context);
  }
  order_.edits += chunks_.back().generates() ? edits : 0;
  order_.taken_over += taken_over;
  return true;
}

bool Scheduler::share_prefix(RunningRequest& request) {
  const ContextBlocks& context = request.context;
  if (!shares_prefix(request) || context.stored() >= request.prompt_size() ||
      context.stored() < context.room()) {
    return true;
  }
  const SharedPart part = part_of(request, limits_);
  prefixes_.take_over(part, request.prefix, request.context, blocks_);
  return request.prefix.blocks < context.size() ||
         !prefixes_.waits(part, request.prefix, request.known() - context.stored());
}

void Scheduler::make_room(std::size_t index, std::int32_t tokens) {
  RunningRequest& request = *running_[index];
  while (request.context.room() < tokens) {
    if (const auto block = take_block(request)) {
      if (block->place != Place::nowhere) {
        prefixes_.taken(*block);
      }
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
  if (attended_on_host(host_, request.request->id)) {
    return blocks_.take(BlockKind::kv, Place::host);
  }
  const BlockKind kind =
      policy_->next_block(host_, {.act_blocks = context.count(BlockKind::act),
                                  .kv_blocks = context.count(BlockKind::kv),
                                  .most_blocks = request.most_of_pools(limits_.kept)});
  return blocks_.take(kind, next_place(request, kind, host_, limits_.kept));
}

void Scheduler::preempt_youngest() {
  give_back(*running_.back());
  resumed_.push_front(std::move(running_.back()));
  running_.pop_back();
  ++preemptions_;
}

void Scheduler::give_back(RunningRequest& request) {
  request.context.give_back_all(blocks_);
  request.prefix.restart();
}

bool Scheduler::admit() {
  if (running() >= limits_.max_num_seqs || waiting() == 0 || prefill_left_ == 0) {
    return false;
  }
  if (resumed_.empty()) {
    resumed_.push_back(std::make_unique<RunningRequest>(*fresh_.front(), *policy_));
    fresh_.pop_front();
  }
  // Surely: all running requests can grow to their ends beside it. Likely: there is room for every
  // request's present text and one more block each; answers often end before max_tokens. Blocks that
  // several requests hold are needed once.
  BlockNeed all = need_;
  all += need_of(*resumed_.front(), limits_.kept);
  const std::int64_t room = blocks_.total() + blocks_.shared() -
                            std::min(all.beside, limits_.kept.beside(limits_.prefill_rows));
  if (!running_.empty() && all.most > room && all.known > room) {
    return false;
  }
  need_ = all;
  running_.push_back(std::move(resumed_.front()));
  resumed_.pop_front();
  return true;
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
      if (shares_prefix(*running) && !running->prefix.has_part) {
        prefixes_.stored(part_of(*running, limits_), running->prefix, running->context);
      }
    }
    if (finished) {
      running->context.give_back_all(blocks_);
    } else {
      share_prefix(*running);  // before the next iteration takes blocks that are free now
      drop_unseen(*running);
      std::swap(running_[kept++], running);
    }
  }
  check(chunk == chunks_.size() && used == outcomes.size(), "outcomes are those of the iteration");
  running_.resize(kept);
  chunks_.clear();
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
    give_back(request);
  }
}

void Scheduler::use(const Policy& policy, const Allocation& wished, const ScheduleLimits& limits) {
  check(chunks_.empty(), "a policy changes between iterations");
  policy_ = &policy;
  host_ = wished;
  limits_ = limits;
  blocks_.set_limits(wished.gpu_act_blocks, wished.gpu_kv_blocks, Place::gpu);
  prefixes_.lose_device();  // where no block is taken there, its memory may be another
  const auto follow = [&](RunningRequest& request) {
    const std::int32_t token_blocks = policy.token_blocks(request.most_blocks);
    request.prefix.leave_index();
    const bool kept_otherwise = request.token_blocks > 0 && request.token_blocks != token_blocks;
    if (kept_otherwise || request.prefix.has_part) {
      give_back(request);
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
  prefixes_.move_border(act_blocks, kv_blocks);
}

void Scheduler::remove(RequestId request) {
  check(chunks_.empty(), "a request is taken out between iterations");
  const auto is_it = [&](const auto& one) { return one->request->id == request; };
  const auto running = std::ranges::find_if(running_, is_it);
  if (running != running_.end()) {
    give_back(**running);
    running_.erase(running);
  }
  std::erase_if(resumed_, is_it);  // these have no blocks
  std::erase_if(fresh_, [&](const Request* one) { return one->id == request; });
}

void Scheduler::abandon(bool device_lost) {
  chunks_.clear();
  if (device_lost) {
    lose_device();
  }
  for (const auto& request : running_) {
    if (request->prefix.has_part) {  // rows behind it are stored nowhere
      give_back(*request);
    }
    request->context.give_back_empty(blocks_);
  }
}

// Of the requests that share a block on the device the oldest will store it again.
void Scheduler::lose_device() {
  prefixes_.lose_device();
  std::set<std::pair<BlockKind, std::uint32_t>> held;
  for (const auto& request : running_) {
    const auto is_held = [&](const BlockRef& block) {
      return block.place == Place::gpu && !held.emplace(block.kind, block.number.n).second;
    };
    request->prefix.leave_index();
    if (std::ranges::any_of(request->context.blocks(), is_held)) {
      give_back(*request);
      continue;
    }
    request->context.lose_device();
    begin_again_if_needed(*request);
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
    if (request.prefix.has_part) {  // the next scheduler looks for one itself
      all.back().stored = request.prefix.blocks * kBlockTokens;
      all.back().blocks.resize(static_cast<std::size_t>(request.prefix.blocks));
    }
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
  if (restored->most_of_pools(limits_.kept) > blocks_.total()) {
    return false;
  }
  if (!begun.running || running() >= limits_.max_num_seqs) {
    resumed_.push_back(std::move(restored));
    return true;
  }
  if (!std::ranges::is_sorted(begun.lost) || !take_again(*restored, begun)) {
    return false;
  }
  const bool begins_again = restored->context.size() == 0;
  if (!begins_again && !begun.lost.empty() &&
      (begun.lost.back() >= begun.blocks.size() ||
       begun.lost.front() < static_cast<std::uint32_t>(restored->context.dropped()))) {
    return false;
  }
  if (!begins_again) {
    restored->context.restore(begun.stored, begun.lost);
    begin_again_if_needed(*restored);
    drop_unseen(*restored);
  }
  running_.push_back(std::move(restored));
  return true;
}

// Takes the blocks that a request had, or holds them with those before it. It begins again where a block of its
// prompt is another's by now, which after a lost device stores the block's rows. False if the snapshot cannot be true.
bool Scheduler::take_again(RunningRequest& request, const Snapshot& begun) {
  const ContextBlocks& before = request.context;
  PrefixChain& chain = request.prefix;
  const auto& prompt = request.request->prompt.get();
  const std::int32_t full = std::min(request.prompt_size(), begun.stored) / kBlockTokens;
  const auto is_it = [&](const auto& one) { return one->request->id == begun.request; };
  bool shares = false;
  for (const BlockRef& block : begun.blocks) {
    const bool nowhere = before.size() < begun.token_blocks;
    const bool dropped = begun.token_blocks == 0 && before.size() == before.dropped() &&
                         block == BlockRef{BlockKind::kv, Place::dropped, {}} &&
                         (before.size() + 1) * kBlockTokens <= begun.stored;
    const std::int32_t at = before.size();
    const bool whole = at < full && begun.token_blocks == 0 &&
                       !std::ranges::binary_search(begun.lost, static_cast<std::uint32_t>(at));
    if (nowhere || dropped) {
      if (nowhere && !(block == BlockRef{BlockKind::kv, Place::nowhere, {}})) {
        return false;
      }
    } else if (blocks_.take(block)) {
      prefixes_.taken(block);
    } else if (std::ranges::any_of(running_, is_it)) {
      return false;
    } else if (whole && chain.blocks == at && prefixes_.holds(prompt, chain, block)) {
      blocks_.share(block);
      shares = true;
    } else if (at < full && begun.token_blocks == 0 && is_taken(blocks_, block)) {
      give_back(request);
      return true;
    } else {
      return false;
    }
    request.context.append(block);
    if (whole && chain.blocks == at && !dropped) {
      prefixes_.add(prompt, chain, block);
    }
  }
  // Which tokens orders have named is not known: the next one names all.
  chain.told = limits_.share_prefixes || shares ? 0 : begun.stored;
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
