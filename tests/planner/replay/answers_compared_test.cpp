#include "planner/replay/answers_compared.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <memory>
#include <utility>

namespace poise {
namespace {

messages::IterationDoneT answers() {
  messages::IterationDoneT done;
  for (const std::uint32_t request : {3u, 7u}) {
    auto answer = std::make_unique<messages::SampleResultT>();
    answer->request = request;
    answer->token = 41;
    answer->chosen = std::make_unique<messages::LogprobRowT>();
    answer->chosen->token = 41;
    answer->chosen->logprob = -0.25f;
    answer->chosen->top = {messages::TokenLogprob(41, -0.25f), messages::TokenLogprob(5, -2.0f)};
    answer->prompt.push_back(std::make_unique<messages::LogprobRowT>());
    answer->prompt.back()->token = 9;
    answer->prompt.back()->logprob = -1.5f;
    done.results.push_back(std::move(answer));
  }
  return done;
}

// The first difference once `change` was made to the replayed answers.
AnswersCompared::Difference difference_after(
    const std::function<void(messages::SampleResultT&)>& change) {
  messages::IterationDoneT replayed = answers();
  change(*replayed.results[1]);
  AnswersCompared compared;
  compared.take(12, answers(), replayed);
  EXPECT_TRUE(compared.first());
  return compared.first().value_or(AnswersCompared::Difference{});
}

TEST(AnswersCompared, EqualAnswersAreCountedAndNothingDiffers) {
  AnswersCompared compared;
  compared.take(1, answers(), answers());
  compared.take(2, answers(), answers());
  EXPECT_EQ(compared.iterations(), 2u);
  EXPECT_EQ(compared.tokens().all, 2u * 2 * 3);  // the token and the two best
  EXPECT_EQ(compared.logprobs().all, 2u * 2 * 4);
  EXPECT_EQ(compared.tokens().differ + compared.logprobs().differ + compared.shapes_differ(), 0u);
  EXPECT_FALSE(compared.first());
}

TEST(AnswersCompared, AnotherTokenIsNamedWithItsRequestAndIteration) {
  const auto first = difference_after([](auto& answer) { answer.token = 40; });
  EXPECT_EQ(first.iteration, 12u);
  EXPECT_EQ(first.request, 7u);
  EXPECT_EQ(first.what, "token");
  EXPECT_EQ(first.recorded, "41");
  EXPECT_EQ(first.replayed, "40");
}

TEST(AnswersCompared, OneBitOfALogprobIsADifference) {
  const auto first =
      difference_after([](auto& answer) { answer.chosen->logprob = std::nextafter(-0.25f, 0.0f); });
  EXPECT_EQ(first.what, "logprob of token 41");
  EXPECT_NE(first.recorded, first.replayed) << "nine digits tell any two floats apart";
}

TEST(AnswersCompared, EveryPartOfAnAnswerIsCompared) {
  using Answer = messages::SampleResultT;
  const std::function<void(Answer&)> changes[] = {
      [](Answer& answer) { answer.request = 8; },
      [](Answer& answer) { answer.finite = false; },
      [](Answer& answer) { answer.token = -1; },
      [](Answer& answer) { answer.chosen.reset(); },
      [](Answer& answer) { answer.chosen->top.pop_back(); },
      [](Answer& answer) { answer.chosen->top[1] = messages::TokenLogprob(6, -2.0f); },
      [](Answer& answer) { answer.chosen->top[1] = messages::TokenLogprob(5, -2.5f); },
      [](Answer& answer) { answer.prompt.clear(); },
      [](Answer& answer) { answer.prompt[0]->logprob = -1.25f; },
      [](Answer& answer) { answer.prompt[0]->token = 10; },
      [](Answer& answer) { answer.chosen->token = 40; },
  };
  for (const auto& change : changes) {
    EXPECT_EQ(difference_after(change).iteration, 12u);
  }
}

TEST(AnswersCompared, AnotherTokensNumbersAreNotCounted) {
  messages::IterationDoneT replayed = answers();
  replayed.results[0]->token = replayed.results[0]->chosen->token = 40;
  replayed.results[0]->chosen->logprob = -4;
  AnswersCompared compared;
  compared.take(4, answers(), replayed);
  EXPECT_EQ(compared.tokens().differ, 1u);
  EXPECT_EQ(compared.logprobs().differ, 0u);
}

TEST(AnswersCompared, AMissingAnswerIsADifference) {
  messages::IterationDoneT replayed = answers();
  replayed.results.pop_back();
  AnswersCompared compared;
  compared.take(4, answers(), replayed);
  EXPECT_EQ(compared.shapes_differ(), 1u);
  EXPECT_EQ(compared.first()->what, "number of answers");
}

}  // namespace
}  // namespace poise
