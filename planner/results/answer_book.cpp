#include "planner/results/answer_book.h"

#include <utility>

#include "common/trouble.h"

namespace poise {
namespace {

TokenValue value_of(const messages::LogprobRow& row) {
  TokenValue value{.token = row.token(), .logprob = row.logprob(), .top = {}};
  if (row.top() != nullptr) {
    value.top.reserve(row.top()->size());
    for (const messages::TokenLogprob* token : *row.top()) {
      value.top.emplace_back(token->token(), token->logprob());
    }
  }
  return value;
}

TokenValue sampled_value(const messages::SampleResult& result, const Request& request) {
  if (result.token() < 0 || (request.sampling.logprobs >= 0 && result.chosen() == nullptr)) {
    fail(Exit::interrupted, "the gpu_executor sampled no token for line {}", request.id.n);
  }
  return result.chosen() != nullptr ? value_of(*result.chosen())
                                    : TokenValue{.token = result.token(), .logprob = 0, .top = {}};
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
    add(chunk, result == by_request.end() ? nullptr : result->second, entry, progress);
    if (entry.answer.finished()) {
      progress.lines.push_back({.request = request.id,
                                .error = entry.answer.reason() == FinishReason::error,
                                .text = entry.answer.result_line(*model_name_, created)});
      progress.saved_tokens +=
          request.sampling.max_tokens - static_cast<std::int64_t>(entry.answer.tokens().size());
      answers_.erase(request.id.n);
    }
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
                   .tokens = running.answer.pushed()});
  }
  return all;
}

bool AnswerBook::restore(const Request& request, const Snapshot& begun) {
  RunningAnswer running{.answer = Answer(request, tokenizer_, *eos_),
                        .prompt_values = begun.prompt_values,
                        .prompt_ran = begun.prompt_ran};
  if (begun.prompt_ran && request.sampling.prompt_logprobs()) {
    if (begun.prompt_values.size() + 1 != request.prompt.size()) {
      return false;
    }
    running.answer.set_prompt_values(std::exchange(running.prompt_values, {}));
  }
  for (const TokenValue& value : begun.tokens) {
    if (running.answer.finished()) {
      return false;
    }
    running.answer.push(value);
  }
  return !running.answer.finished() && answers_.emplace(request.id.n, std::move(running)).second;
}

void AnswerBook::add(const ScheduledChunk& chunk, const messages::SampleResult* result,
                     RunningAnswer& running, Progress& progress) {
  const Request& request = *chunk.request->request;
  Answer& answer = running.answer;
  if (chunk.generates() && result == nullptr) {
    fail(Exit::interrupted, "the gpu_executor has no result for line {}", request.id.n);
  }
  if (result != nullptr && !result->finite()) {
    answer.break_off();
    progress.outcomes.push_back({.request = request.id, .token = std::nullopt});
    return;
  }
  if (result != nullptr && result->prompt() != nullptr) {
    for (const messages::LogprobRow* row : *result->prompt()) {
      running.prompt_values.push_back(value_of(*row));
    }
  }
  if (!running.prompt_ran && chunk.context + chunk.new_tokens >= chunk.request->prompt_size()) {
    running.prompt_ran = true;
    progress.prompt_tokens += chunk.request->prompt_size();
    if (request.sampling.prompt_logprobs()) {
      if (running.prompt_values.size() + 1 != request.prompt.size()) {
        fail(Exit::interrupted, "the gpu_executor valued {} prompt tokens of {} for line {}",
             running.prompt_values.size(), request.prompt.size() - 1, request.id.n);
      }
      answer.set_prompt_values(std::move(running.prompt_values));
    }
  }
  if (!chunk.complete()) {
    return;
  }
  Outcome outcome{.request = request.id, .token = std::nullopt};
  if (chunk.generates()) {
    answer.push(sampled_value(*result, request));
    ++progress.generated_tokens;
    if (!answer.finished()) {
      outcome.token = answer.tokens().back();
    }
  } else {
    answer.finish_scoring();
  }
  progress.outcomes.push_back(outcome);
}

}  // namespace poise
