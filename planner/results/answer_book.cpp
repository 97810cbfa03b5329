#include "planner/results/answer_book.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "common/trouble.h"
#include "planner/results/result_line.h"

namespace poise {
namespace {

TokenLogprobs logprobs_of(const messages::LogprobRow& row) {
  TokenLogprobs logprobs{.logprob = row.logprob(), .top = {}};
  if (row.top() != nullptr) {
    logprobs.top.reserve(row.top()->size());
    for (const messages::TokenLogprob* token : *row.top()) {
      logprobs.top.emplace_back(token->token(), token->logprob());
    }
  }
  return logprobs;
}

void check_sampled(const messages::SampleResult& result, const Request& request) {
  const bool wants = request.sampling.logprobs >= 0;
  if (result.token() < 0 ||
      (wants && (result.chosen() == nullptr || result.chosen()->token() != result.token()))) {
    fail(Exit::interrupted, "the gpu_executor sampled no token for line {}", request.line().n);
  }
}

}  // namespace

AnswerBook::AnswerBook(const Tokenizer* tokenizer, const std::vector<TokenId>& eos,
                       const std::string& model_name)
    : tokenizer_(tokenizer), eos_(&eos), model_name_(&model_name) {}

AnswerBook::Progress AnswerBook::apply(std::span<const ScheduledChunk> chunks,
                                       const messages::IterationDone& results,
                                       std::int64_t created) {
  std::unordered_map<std::uint32_t, const messages::SampleResult*> by_request;
  if (results.results() != nullptr) {
    by_request.reserve(results.results()->size());
    for (const messages::SampleResult* result : *results.results()) {
      by_request[result->request()] = result;
    }
  }
  Progress progress;
  for (const ScheduledChunk& chunk : chunks) {
    const Request& request = *chunk.request->request;
    const auto result = by_request.find(request.id.n);
    const auto running = answers_.find(request.id.n);
    RunningAnswer& entry =
        running != answers_.end()
            ? running->second
            : answers_
                  .emplace(request.id.n, RunningAnswer{.answer = Answer(request, tokenizer_, *eos_),
                                                       .prompt_values = {}})
                  .first->second;
    const std::optional<TokenId> sampled =
        add(chunk, result == by_request.end() ? nullptr : result->second, entry, progress);
    if (entry.answer.finished()) {
      std::vector<TokenId> tokens = chunk.request->answer;
      if (sampled) {
        tokens.push_back(*sampled);
      }
      if (auto line = choices_.add(request, entry.answer, tokens, *model_name_, created)) {
        progress.lines.push_back(*std::move(line));
      } else if (entry.answer.reason() == FinishReason::error &&
                 std::ranges::find(progress.failed, request.line()) == progress.failed.end()) {
        progress.failed.push_back(request.line());
      }
      progress.saved_tokens += request.sampling.max_tokens - entry.answer.size();
      answers_.erase(request.id.n);
    }
  }
  std::erase_if(progress.failed, [&](RequestId line) {  // all its choices ended in this iteration
    return std::ranges::find(progress.lines, line, &ResultLine::request) != progress.lines.end();
  });
  return progress;
}

const Answer* AnswerBook::find(RequestId request) const {
  const auto found = answers_.find(request.n);
  return found == answers_.end() ? nullptr : &found->second.answer;
}

void AnswerBook::remove(const Request& request) {
  answers_.erase(request.id.n);
  if (request.choice + 1 == request.choices) {
    choices_.forget(request.line());
  }
}

AnswerBook::Progress AnswerBook::give_up(const Request& request) {
  return refuse(request,
                {.message = "the gpu_executor died each time it ran this request; the run went on "
                            "without it",
                 .code = "worker_crash",
                 .status = 500});
}

AnswerBook::Progress AnswerBook::refuse(const Request& request, RequestError why) {
  why.line = request.line();
  why.custom_id = request.custom_id.get();
  const auto running = answers_.extract(request.id.n);
  const std::int32_t answered = running.empty() ? 0 : running.mapped().answer.size();
  Progress progress;
  progress.saved_tokens = request.sampling.max_tokens - answered;
  auto line = choices_.fail(request, error_line(why));
  if (line) {
    progress.lines.push_back(*std::move(line));
  }
  return progress;
}

std::vector<AnswerBook::Snapshot> AnswerBook::snapshots() const {
  std::vector<Snapshot> all;
  all.reserve(answers_.size());
  for (const auto& [id, running] : answers_) {
    all.push_back({.request = {id},
                   .prompt_ran = running.prompt_ran,
                   .prompt_values =
                       running.prompt_ran ? running.answer.prompt_values() : running.prompt_values,
                   .values = running.answer.values()});
  }
  return all;
}

bool AnswerBook::restore(const Request& request, std::span<const TokenId> answer,
                         const Snapshot& begun) {
  const bool wants = request.sampling.logprobs >= 0;
  if (begun.values.size() != (wants ? answer.size() : 0)) {
    return false;
  }
  RunningAnswer running{.answer = Answer(request, tokenizer_, *eos_),
                        .prompt_values = begun.prompt_values,
                        .prompt_ran = begun.prompt_ran};
  if (begun.prompt_ran && request.sampling.prompt_logprobs()) {
    if (begun.prompt_values.size() != request.valued()) {
      return false;
    }
    running.answer.set_prompt_values(std::exchange(running.prompt_values, {}));
  }
  for (std::size_t i = 0; i < answer.size(); ++i) {
    if (running.answer.finished()) {
      return false;
    }
    running.answer.push(answer[i], wants ? begun.values[i] : TokenLogprobs{});
  }
  return !running.answer.finished() && answers_.emplace(request.id.n, std::move(running)).second;
}

std::optional<TokenId> AnswerBook::add(const ScheduledChunk& chunk,
                                       const messages::SampleResult* result, RunningAnswer& running,
                                       Progress& progress) {
  const Request& request = *chunk.request->request;
  Answer& answer = running.answer;
  if (chunk.generates() && result == nullptr) {
    fail(Exit::interrupted, "the gpu_executor has no result for line {}", request.line().n);
  }
  if (result != nullptr && (!result->finite() || result->barred())) {
    answer.break_off(result->barred());
    progress.outcomes.push_back({.request = request.id, .token = std::nullopt});
    return std::nullopt;
  }
  if (result != nullptr && result->prompt() != nullptr) {
    for (const messages::LogprobRow* row : *result->prompt()) {
      const std::size_t position = running.prompt_values.size() + request.first_valued();
      if (position >= request.given_tokens() ||
          row->token() != request.token_or_scored(position)) {
        fail(Exit::interrupted,
             "the gpu_executor valued token {} as prompt token {} of line {}, which is another",
             row->token(), position, request.line().n);
      }
      running.prompt_values.push_back(logprobs_of(*row));
    }
  }
  if (!running.prompt_ran && chunk.context + chunk.new_tokens >= chunk.request->prompt_size()) {
    running.prompt_ran = true;
    progress.prompt_tokens += chunk.request->prompt_size();
    if (request.sampling.prompt_logprobs()) {
      if (running.prompt_values.size() != request.valued()) {
        fail(Exit::interrupted, "the gpu_executor valued {} prompt tokens of {} for line {}",
             running.prompt_values.size(), request.valued(), request.line().n);
      }
      answer.set_prompt_values(std::move(running.prompt_values));
      if (answer.finished()) {  // one of them is no probability
        progress.outcomes.push_back({.request = request.id, .token = std::nullopt});
        return std::nullopt;
      }
    }
  }
  if (!chunk.complete()) {
    return std::nullopt;
  }
  std::optional<TokenId> sampled;
  Outcome outcome{.request = request.id, .token = std::nullopt};
  if (chunk.generates()) {
    check_sampled(*result, request);
    sampled = result->token();
    answer.push(*sampled,
                result->chosen() != nullptr ? logprobs_of(*result->chosen()) : TokenLogprobs{});
    ++progress.generated_tokens;
    if (!answer.finished()) {
      outcome.token = sampled;
    }
  } else {
    answer.finish_scoring();
  }
  progress.outcomes.push_back(outcome);
  return sampled;
}

}  // namespace poise
