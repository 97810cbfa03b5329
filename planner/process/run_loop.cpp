#include "planner/process/run_loop.h"

#include <fmt/core.h>

#include <algorithm>
#include <ctime>
#include <span>
#include <unordered_map>
#include <unordered_set>

#include "common/families/rotary.h"
#include "common/process.h"
#include "common/trouble.h"
#include "common/words.h"
#include "planner/links/announce.h"
#include "planner/links/clock.h"
#include "planner/schedule/iteration.h"

namespace poise {
namespace {

// Prompts that begin alike share blocks where a row hangs on the tokens up to its own alone, and all rows are kept. Of a block that
// some rows absorb and others do not there would be two copies on the device: these two do not go together.
ScheduleLimits limits_of(const Run& run, const PlanInForce& in_force) {
  ScheduleLimits limits = in_force.schedule();
  limits.share_prefixes = run.options.batch.share_prefixes && !run.options.batch.absorption &&
                          windows_of(run.shape()).empty() && !depends_on_prompt(run.shape());
  return limits;
}

// Those of requests whose next token is sampled.
void add_masks(std::unordered_map<std::uint32_t, std::vector<std::uint32_t>>& masks,
               messages::IterationT& tables) {
  if (masks.empty()) {
    return;
  }
  for (const auto& batch : tables.mini_batches) {
    for (const auto& sample : batch->samples) {
      const auto mask = masks.find(batch->sequences[sample->sequence].request());
      if (sample->generate && mask != masks.end()) {
        std::vector<std::uint32_t>& words = mask->second;
        for (std::size_t i = 0; i < sample->mask.size(); ++i) {  // of allowed_token_ids
          words[i] &= sample->mask[i];
        }
        sample->mask = std::move(words);
      }
    }
  }
}

}  // namespace

RunLoop::RunLoop(Run& run, const PlanInForce& in_force, std::optional<Journal> journal)
    : run_(run), in_force_(in_force), since_(monotonic_now()) {
  begin_anew();
  if (journal && journal->executor != run_.executor->greeting()->epoch) {
    lose_blocks(*journal, Lost::device);
  }
  if (journal && !restore(*journal)) {
    announce("the journal contradicts itself; what was under way is computed again");
    journal.reset();
    begin_anew();
  }
  use_plan();
  std::unordered_set<std::uint32_t> begun;
  if (journal) {
    for (const Scheduler::Snapshot& one : journal->requests) {
      begun.insert(one.request.n);
    }
  }
  for (const Request* request : run_.to_do) {
    if (!begun.contains(request->id.n)) {
      scheduler_->add(*request);
    }
  }
}

void RunLoop::begin_anew() {
  const PoolPartition& pool = run_.loader->grant()->partition;
  Allocation blocks = in_force_.plan.host;
  blocks.act_blocks = pool.act_blocks;
  blocks.kv_blocks = pool.kv_blocks;
  const ScheduleLimits limits = limits_of(run_, in_force_);
  if (run_.options.batch.share_prefixes && !limits.share_prefixes) {
    run_.print(
        "prompts that begin alike are computed each for itself: the model has a sliding window, or "
        "rotary frequencies "
        "that depend on the prompt's length, or --absorption is on\n");
  }
  scheduler_ = std::make_unique<Scheduler>(*in_force_.policy, blocks, limits);
  answers_ = std::make_unique<AnswerBook>(run_.input.tokenizer.get(), run_.input.model.eos,
                                          run_.options.served_model_name);
}

// Requests that had begun, as the journal has them. False where it contradicts itself.
bool RunLoop::restore(const Journal& journal) {
  std::unordered_map<std::uint32_t, const Request*> by_line;
  for (const Request* request : run_.to_do) {
    by_line.emplace(request->id.n, request);
  }
  std::unordered_map<std::uint32_t, std::span<const TokenId>> answered;
  std::int64_t tokens = 0;
  for (const Scheduler::Snapshot& begun : journal.requests) {
    const auto found = by_line.find(begun.request.n);
    if (found == by_line.end() || !scheduler_->restore(*found->second, begun)) {
      return false;
    }
    answered.emplace(begun.request.n, begun.answer);
    tokens += std::ssize(begun.answer);
  }
  for (const AnswerBook::Snapshot& begun : journal.answers) {
    const auto answer = answered.extract(begun.request.n);
    if (answer.empty() ||
        !answers_->restore(*by_line.at(begun.request.n), answer.mapped(), begun)) {
      return false;
    }
  }
  const bool unknown =
      std::ranges::any_of(answered, [](const auto& left) { return !left.second.empty(); });
  if (unknown) {  // tokens of an answer that is in no book
    return false;
  }
  run_.status.tokens_left -= tokens;
  run_.status.prompt_tokens = journal.prompt_tokens;
  run_.status.generated_tokens = journal.generated_tokens;
  iteration_ = journal.iteration;
  search_ = CulpritSearch(journal.search);
  before_.preemptions = journal.preemptions;
  before_.shared_tokens = journal.shared_tokens;
  predicted_before_ = journal.predicted;
  run_.executor->go_on_counting(journal.totals);
  since_ = monotonic_now() - Seconds{journal.elapsed};
  return true;
}

void RunLoop::configured() {
  if (!in_force_.profile) {
    return;
  }
  if (!prediction_) {
    prediction_.emplace(*in_force_.profile, run_.layout(), in_force_.device,
                        windows_of(run_.shape()), predicted_before_);
  } else {
    prediction_->reconfigure(*in_force_.profile, run_.layout(), in_force_.device);
  }
}

void RunLoop::use_plan() {
  const PoolPartition& pool = run_.loader->grant()->partition;
  const BlockSizes sizes = run_.block_sizes();
  // As many of each kind as there could be: the border moves.
  const auto most = [&](BlockKind kind) {
    return static_cast<std::uint32_t>(pool.region_bytes /
                                      static_cast<std::uint64_t>(sizes.block(kind).n));
  };
  const Allocation& host = in_force_.plan.host;
  tables_ = std::make_unique<OrderTables>(Allocation{.act_blocks = most(BlockKind::act),
                                                     .kv_blocks = most(BlockKind::kv),
                                                     .gpu_act_blocks = host.gpu_act_blocks,
                                                     .gpu_kv_blocks = host.gpu_kv_blocks},
                                          windows_of(run_.shape()), in_force_.device.absorption);
  scheduler_->use(*in_force_.policy, host, limits_of(run_, in_force_));
}

void RunLoop::use_partition(const PoolPartition& pool) {
  scheduler_->move_border(pool.act_blocks, pool.kv_blocks);
}

void RunLoop::executor_was_lost() {
  std::optional<RequestId> culprit;
  if (run_.executor->greeting()->after_death && !chunks_.empty()) {
    const bool searched = search_.searching();
    culprit = search_.died(parts());
    if (search_.searching() && !searched) {
      announce(
          fmt::format("the gpu_executor died twice at the same place: looking for the request that "
                      "kills it among {}",
                      counted(std::ssize(search_.state().suspects), "request")));
    }
  }
  chunks_.clear();
  scheduler_->abandon(true);
  if (culprit) {
    give_up(*culprit);
  }
}

// Of the iteration under way.
std::vector<RequestPart> RunLoop::parts() const {
  std::vector<RequestPart> parts;
  for (const ScheduledChunk& chunk : chunks_) {
    parts.push_back(
        {.request = chunk.request->request->id, .end = chunk.context + chunk.new_tokens});
  }
  return parts;
}

bool RunLoop::receive_requests(Seconds wait) {
  FrontLink& front = *run_.front;
  const bool sent = front.flush(monotonic_now());
  front.step(idle() || !sent ? wait : Seconds{0});
  for (const Request* cancelled : front.take_cancelled()) {
    remove(*cancelled);
  }
  for (const Request* arrived : front.take_arrived()) {
    run_.to_do.push_back(arrived);
    scheduler_->add(*arrived);
    run_.status.requests += arrived->choice == 0 ? 1 : 0;
    run_.status.tokens_left += arrived->sampling.max_tokens;
  }
  if (idle()) {
    run_.executor->pause_balance();
  }
  return front.flush(monotonic_now()) && !idle();
}

void RunLoop::remove(const Request& request) {
  std::erase(run_.to_do, &request);
  run_.status.requests -= request.choice == 0 ? 1 : 0;
  if (!answers_->ended(request)) {
    const Answer* const answer = answers_->find(request.id);
    run_.status.tokens_left -=
        request.sampling.max_tokens - (answer != nullptr ? answer->size() : 0);
    scheduler_->remove(request.id);
  }
  answers_->remove(request);
}

void RunLoop::give_up(RequestId culprit) {
  const auto request = std::ranges::find(run_.to_do, culprit, &Request::id);
  check(request != run_.to_do.end(), "a culprit is a request under way");
  const RequestId line = (*request)->line();
  end_choices(line);  // its other choices have the same prompt
  if (run_.results) {
    run_.results->sync();  // it cost several executors
  }
  announce(
      fmt::format("the gpu_executor dies each time it runs line {}: that line gets an error, and "
                  "the others go on",
                  line.n));
}

// Those of a line that gets an error.
void RunLoop::end_choices(RequestId line, const std::optional<RequestError>& why) {
  std::vector<const Request*> open;  // found before one of them ends the line
  std::ranges::copy_if(run_.to_do, std::back_inserter(open), [&](const Request* one) {
    return one->line() == line && !answers_->ended(*one);
  });
  for (const Request* one : open) {
    scheduler_->remove(one->id);
    write(why ? answers_->refuse(*one, *why) : answers_->give_up(*one));
  }
}

bool RunLoop::choose_chunks() {
  while (!idle() && !stop_requested()) {
    auto chunks = scheduler_->next(search_.probe());
    if (chunks.empty()) {  // the suspects have no room beside the others
      search_.end();
      chunks = scheduler_->next();
    }
    chunks_.assign(chunks.begin(), chunks.end());
    if (take_masks()) {
      return true;
    }
  }
  return false;
}

bool RunLoop::take_masks() {
  masks_.clear();
  std::vector<GrammarWish> wishes;
  for (const ScheduledChunk& chunk : chunks_) {
    const Request& request = *chunk.request->request;
    const LogitWishes* const all = request.sampling.wishes.get();
    if (all != nullptr && all->grammar && request.sampling.max_tokens > 0 &&
        (chunk.generates() || !run_.grammars->knows(request.id))) {
      wishes.push_back({request.id, all->grammar, chunk.request->answer});
    }
  }
  if (wishes.empty()) {
    return true;
  }
  std::vector<GrammarMask> masks = run_.grammars->masks(wishes);
  if (masks.empty()) {
    chunks_.clear();
    scheduler_->abandon(false);
    return false;
  }
  std::vector<std::pair<RequestId, RequestError>> refused;
  for (std::size_t i = 0; i < wishes.size(); ++i) {
    if (masks[i].refusal.empty()) {
      masks_.emplace(wishes[i].request.n, std::move(masks[i].words));
      continue;
    }
    const auto request = std::ranges::find(run_.to_do, wishes[i].request, &Request::id);
    const RequestId line = (*request)->line();
    const std::string& param = wishes[i].grammar->param;
    const auto is_of_line = [&](const auto& one) { return one.first == line; };
    if (std::ranges::none_of(refused, is_of_line)) {  // of its choices one is enough
      refused.emplace_back(
          line, RequestError{.message = fmt::format("\"{}\" {}", param, masks[i].refusal),
                             .param = param,
                             .code = "invalid_value"});
    }
  }
  if (refused.empty()) {
    return true;
  }
  chunks_.clear();
  scheduler_->abandon(false);
  for (const auto& [line, why] : refused) {
    end_choices(line, why);
  }
  return false;
}

bool RunLoop::begin_iteration() {
  const Seconds begin = iteration_began_ = monotonic_now();
  if (!choose_chunks()) {
    return false;
  }
  messages::IterationT tables = plan_iteration(
      {.policy = *in_force_.policy, .host = in_force_.plan.host, .limits = in_force_.pack()},
      chunks_, *tables_, {.number = ++iteration_, .pool_epoch = run_.loader->grant()->pool_epoch});
  add_masks(masks_, tables);
  const bool last = scheduler_->last_iteration();
  LinkIdle idle;
  if (prediction_) {
    idle = prediction_->begin(tables, last, begin);
  }
  run_.status.planning_time += monotonic_now() - begin;
  run_.executor->begin(std::move(tables), last, std::move(idle));
  return true;
}

bool RunLoop::take_results() {
  const auto results = run_.executor->take_results();
  if (!results) {
    return false;
  }
  const Seconds begin = monotonic_now();
  if (prediction_) {
    prediction_->done(begin);
  }
  const AnswerBook::Progress progress =
      answers_->apply(chunks_, *(*results)->body_as_IterationDone(), std::time(nullptr));
  note_iteration(begin);
  write(progress);
  const Seconds middle = monotonic_now();
  search_.survived(parts());
  const std::vector<const RunningRequest*> streams = streaming();
  scheduler_->complete(progress.outcomes);
  chunks_.clear();
  for (const RunningRequest* one : streams) {
    const RequestId id = one->request->id;
    run_.front->progress(id, *answers_->find(id), one->answer);
  }
  for (const RequestId line : progress.failed) {
    end_choices(line);
  }
  run_.status.answer_time += middle - begin;
  run_.status.planning_time += monotonic_now() - middle;
  return true;
}

// What metrics say of the iteration that ended at `now`.
void RunLoop::note_iteration(Seconds now) {
  std::int64_t rows = 0;
  for (const ScheduledChunk& chunk : chunks_) {
    rows += chunk.new_tokens;
    if (run_.front) {
      run_.front->ran(chunk.request->request->id, chunk.generates(), iteration_began_, now,
                      run_.status.token_seconds);
    }
  }
  run_.status.iteration_tokens.observe(static_cast<double>(rows));
}

std::vector<const RunningRequest*> RunLoop::streaming() const {
  std::vector<const RunningRequest*> all;
  if (run_.front) {
    for (const ScheduledChunk& chunk : chunks_) {
      const RequestId id = chunk.request->request->id;
      if (run_.front->streams(id) && answers_->find(id) != nullptr) {
        all.push_back(chunk.request);
      }
    }
  }
  return all;
}

void RunLoop::write(const AnswerBook::Progress& progress) {
  run_.write(progress.lines);
  RunStatus& status = run_.status;
  status.prompt_tokens += progress.prompt_tokens;
  status.generated_tokens += progress.generated_tokens;
  status.tokens_left -= progress.generated_tokens + progress.saved_tokens;
}

FixedResources RunLoop::fixed_resources() const {
  FixedResources fixed{.pool = run_.loader->grant()->partition,
                       .running = static_cast<std::int32_t>(scheduler_->running())};
  const bool used = blocks().pool(BlockKind::act, Place::gpu).taken() > 0 ||
                    blocks().pool(BlockKind::kv, Place::gpu).taken() > 0;
  if (used) {  // else the device's may be as many as are wished
    fixed.placement.gpu_act_blocks = in_force_.plan.host.gpu_act_blocks;
    fixed.placement.gpu_kv_blocks = in_force_.plan.host.gpu_kv_blocks;
  }
  return fixed;
}

std::vector<const Request*> RunLoop::unanswered() const {
  if (run_.front) {
    return run_.to_do;
  }
  std::vector<const Request*> all;
  std::ranges::copy_if(run_.to_do, std::back_inserter(all),
                       [&](const Request* one) { return !run_.results->is_done(one->line()); });
  return all;
}

void RunLoop::describe(Journal& journal) const {
  journal.gpu_act_blocks = in_force_.plan.host.gpu_act_blocks;
  journal.gpu_kv_blocks = in_force_.plan.host.gpu_kv_blocks;
  journal.executor = run_.executor->greeting() ? run_.executor->greeting()->epoch : 0;
  journal.iteration = iteration_;
  journal.prompt_tokens = run_.status.prompt_tokens;
  journal.generated_tokens = run_.status.generated_tokens;
  journal.preemptions = before_.preemptions + scheduler_->preemptions();
  journal.shared_tokens = before_.shared_tokens + scheduler_->shared_tokens();
  journal.elapsed = (monotonic_now() - since_).n;
  journal.totals = run_.executor->totals();
  journal.predicted = prediction_ ? prediction_->figures() : predicted_before_;
  journal.requests = scheduler_->snapshots();
  journal.answers = answers_->snapshots();
  journal.search = search_.state();
}

void RunLoop::report() {
  RunStatus& status = run_.status;
  status.running = scheduler_->running();
  status.waiting = scheduler_->waiting();
  status.preemptions = before_.preemptions + scheduler_->preemptions();
  status.shared_prompt_tokens = before_.shared_tokens + scheduler_->shared_tokens();
  status.free_blocks = scheduler_->blocks().free();
  status.pools.clear();
  for (const BlockKind kind : {BlockKind::act, BlockKind::kv}) {
    for (const Place place : {Place::host, Place::gpu}) {
      const BlockPool& pool = scheduler_->blocks().pool(kind, place);
      status.pools.push_back({.kind = kind == BlockKind::act ? "act" : "kv",
                              .place = place == Place::host ? "host" : "device",
                              .total = pool.limit(),
                              .taken = pool.taken()});
    }
  }
  if (prediction_) {
    status.prediction = prediction_->figures();
  }
  status.iteration = iteration_;
  status.suspects = search_.searching() ? std::ssize(search_.state().suspects) : 0;
  status.elapsed = monotonic_now() - since_;
}

}  // namespace poise
