#include "planner/answer_book.h"

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

AnswerBook::Progress AnswerBook::apply(std::span<const Part> parts,
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
  for (const Part& part : parts) {
    const Request& request = *part.request->request;
    const auto result = by_request.find(request.id.n);
    const auto under_way = answers_.find(request.id.n);
    UnderWayAnswer& entry =
        under_way != answers_.end()
            ? under_way->second
            : answers_
                  .emplace(request.id.n,
                           UnderWayAnswer{.answer = Answer(request, tokenizer_, *eos_),
                                          .prompt_values = {}})
                  .first->second;
    add(part, result == by_request.end() ? nullptr : result->second, entry, progress);
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

std::vector<AnswerBook::Begun> AnswerBook::begun() const {
  std::vector<Begun> all;
  all.reserve(answers_.size());
  for (const auto& [id, under_way] : answers_) {
    all.push_back({.request = {id},
                   .prompt_ran = under_way.prompt_ran,
                   .prompt_values = under_way.prompt_ran ? under_way.answer.prompt_values()
                                                         : under_way.prompt_values,
                   .tokens = under_way.answer.pushed()});
  }
  return all;
}

bool AnswerBook::go_on_with(const Request& request, const Begun& begun) {
  UnderWayAnswer under_way{.answer = Answer(request, tokenizer_, *eos_),
                           .prompt_values = begun.prompt_values,
                           .prompt_ran = begun.prompt_ran};
  if (begun.prompt_ran && request.sampling.prompt_logprobs()) {
    if (begun.prompt_values.size() + 1 != request.prompt.size()) {
      return false;
    }
    under_way.answer.set_prompt_values(std::exchange(under_way.prompt_values, {}));
  }
  for (const TokenValue& value : begun.tokens) {
    if (under_way.answer.finished()) {
      return false;
    }
    under_way.answer.push(value);
  }
  return !under_way.answer.finished() &&
         answers_.emplace(request.id.n, std::move(under_way)).second;
}

void AnswerBook::add(const Part& part, const messages::SampleResult* result,
                     UnderWayAnswer& under_way, Progress& progress) {
  const Request& request = *part.request->request;
  Answer& answer = under_way.answer;
  if (part.generates() && result == nullptr) {
    fail(Exit::interrupted, "the gpu_executor has no result for line {}", request.id.n);
  }
  if (result != nullptr && !result->finite()) {
    answer.break_off();
    progress.outcomes.push_back({.request = request.id, .token = std::nullopt});
    return;
  }
  if (result != nullptr && result->prompt() != nullptr) {
    for (const messages::LogprobRow* row : *result->prompt()) {
      under_way.prompt_values.push_back(value_of(*row));
    }
  }
  if (!under_way.prompt_ran && part.context + part.new_tokens >= part.request->prompt_size()) {
    under_way.prompt_ran = true;
    progress.prompt_tokens += part.request->prompt_size();
    if (request.sampling.prompt_logprobs()) {
      if (under_way.prompt_values.size() + 1 != request.prompt.size()) {
        fail(Exit::interrupted, "the gpu_executor valued {} prompt tokens of {} for line {}",
             under_way.prompt_values.size(), request.prompt.size() - 1, request.id.n);
      }
      answer.set_prompt_values(std::move(under_way.prompt_values));
    }
  }
  if (!part.complete()) {
    return;
  }
  Outcome outcome{.request = request.id, .token = std::nullopt};
  if (part.generates()) {
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
