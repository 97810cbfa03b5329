#include "planner/results/choices.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "common/trouble.h"
#include "planner/results/result_line.h"

namespace poise {

std::optional<ResultLine> Choices::add(const Request& request, const Answer& answer,
                                       std::span<const TokenId> tokens,
                                       const std::string& model_name, std::int64_t created) {
  check(answer.finished(), "a choice is of a finished answer");
  if (answer.reason() == FinishReason::error) {
    return fail(request, answer.error_line_text());
  }
  Line& line = line_of(request);
  line.choices[static_cast<std::size_t>(request.choice)] = answer.choice_text(tokens);
  line.beside = answer.beside_choices();
  line.tokens += tokens.size();
  return end(request, line, [&] {
    return answered_line(
        request.line(), request.custom_id,
        response_body(request, line.choices, line.beside, line.tokens, model_name, created));
  });
}

std::optional<ResultLine> Choices::fail(const Request& request, std::string error_line) {
  Line& line = line_of(request);
  line.error = line.error.empty() ? std::move(error_line) : line.error;
  return end(request, line, [&] { return line.error; });
}

bool Choices::ended(const Request& request) const {
  const auto found = lines_.find(request.line().n);
  return found != lines_.end() && found->second.ended[static_cast<std::size_t>(request.choice)];
}

Choices::Line& Choices::line_of(const Request& request) {
  Line& line = lines_[request.line().n];
  line.choices.resize(static_cast<std::size_t>(request.choices));
  line.ended.resize(static_cast<std::size_t>(request.choices));
  return line;
}

template <typename Text>
std::optional<ResultLine> Choices::end(const Request& request, Line& line, const Text& text) {
  line.ended[static_cast<std::size_t>(request.choice)] = true;
  if (!std::ranges::all_of(line.ended, std::identity())) {
    return std::nullopt;
  }
  const bool error = !line.error.empty();
  ResultLine result{.request = request.line(), .error = error, .text = error ? line.error : text()};
  lines_.erase(request.line().n);
  return result;
}

}  // namespace poise
