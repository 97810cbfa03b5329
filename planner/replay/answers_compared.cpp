#include "planner/replay/answers_compared.h"

#include <fmt/core.h>

#include <algorithm>
#include <bit>
#include <utility>

namespace poise {

void AnswersCompared::take(std::uint64_t iteration, const messages::IterationDoneT& recorded,
                           const messages::IterationDoneT& replayed) {
  ++iterations_;
  take_shape({iteration, 0}, "number of answers", recorded.results.size(), replayed.results.size());
  for (std::size_t i = 0; i < std::min(recorded.results.size(), replayed.results.size()); ++i) {
    take({iteration, recorded.results[i]->request}, *recorded.results[i], *replayed.results[i]);
  }
}

void AnswersCompared::take(const Place& place, const messages::SampleResultT& recorded,
                           const messages::SampleResultT& replayed) {
  take_shape(place, "request", recorded.request, replayed.request);
  take_shape(place, "finite", recorded.finite, replayed.finite);
  take_shape(place, "barred", recorded.barred, replayed.barred);
  if (recorded.token >= 0 || recorded.token != replayed.token) {
    take_token(place, "token", recorded.token, replayed.token);
  }
  take_shape(place, "logprobs of the token", recorded.chosen != nullptr,
             replayed.chosen != nullptr);
  if (recorded.chosen && replayed.chosen && recorded.token == replayed.token) {
    take(place, *recorded.chosen, *replayed.chosen);
  }
  take_shape(place, "rows of prompt logprobs", recorded.prompt.size(), replayed.prompt.size());
  for (std::size_t i = 0; i < std::min(recorded.prompt.size(), replayed.prompt.size()); ++i) {
    take(place, *recorded.prompt[i], *replayed.prompt[i]);
  }
}

void AnswersCompared::take(const Place& place, const messages::LogprobRowT& recorded,
                           const messages::LogprobRowT& replayed) {
  if (recorded.token != replayed.token) {
    take_token(place, "token with logprobs", recorded.token, replayed.token);
    return;  // numbers of other tokens say nothing
  }
  take_logprob(place, recorded.token, recorded.logprob, replayed.logprob);
  take_shape(place, "number of best tokens", recorded.top.size(), replayed.top.size());
  for (std::size_t i = 0; i < std::min(recorded.top.size(), replayed.top.size()); ++i) {
    take_token(place, "best token", recorded.top[i].token(), replayed.top[i].token());
    take_logprob(place, recorded.top[i].token(), recorded.top[i].logprob(),
                 replayed.top[i].logprob());
  }
}

void AnswersCompared::take_token(const Place& place, const char* what, std::int32_t recorded,
                                 std::int32_t replayed) {
  ++tokens_.all;
  if (recorded != replayed) {
    ++tokens_.differ;
    differs(place, what, fmt::format("{}", recorded), fmt::format("{}", replayed));
  }
}

void AnswersCompared::take_logprob(const Place& place, std::int32_t token, float recorded,
                                   float replayed) {
  ++logprobs_.all;
  if (std::bit_cast<std::uint32_t>(recorded) != std::bit_cast<std::uint32_t>(replayed)) {
    ++logprobs_.differ;
    differs(place, fmt::format("logprob of token {}", token), fmt::format("{:.9g}", recorded),
            fmt::format("{:.9g}", replayed));
  }
}

void AnswersCompared::take_shape(const Place& place, const char* what, std::size_t recorded,
                                 std::size_t replayed) {
  if (recorded != replayed) {
    ++shapes_differ_;
    differs(place, what, fmt::format("{}", recorded), fmt::format("{}", replayed));
  }
}

void AnswersCompared::differs(const Place& place, std::string what, std::string recorded,
                              std::string replayed) {
  if (!first_) {
    first_ = Difference{.iteration = place.iteration,
                        .request = place.request,
                        .what = std::move(what),
                        .recorded = std::move(recorded),
                        .replayed = std::move(replayed)};
  }
}

}  // namespace poise
