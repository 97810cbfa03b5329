#include "planner/schedule/logit_edits.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <tuple>

namespace poise {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

constexpr float kBarred = -std::numeric_limits<float>::infinity();
using Edit = std::tuple<std::int32_t, float, float, float>;

std::vector<Edit> edits(LogitWishes wishes, const std::vector<TokenId>& answer,
                        std::int32_t min_tokens = 0) {
  SamplingParams sampling;
  sampling.min_tokens = min_tokens;
  sampling.wishes = std::make_shared<const LogitWishes>(std::move(wishes));
  std::vector<Edit> all;
  for (const messages::LogitEdit& edit : logit_edits(sampling, answer)) {
    all.emplace_back(edit.token(), edit.bias(), edit.factor(), edit.minus());
  }
  EXPECT_LE(std::ssize(all), sampling.wishes->most_edits(static_cast<std::int32_t>(answer.size())));
  return all;
}

TEST(LogitEdits, OfARequestWithoutWishesThereAreNone) {
  EXPECT_THAT(logit_edits({}, std::vector<TokenId>{1, 2}), IsEmpty());
}

TEST(LogitEdits, PresenceCountsOnceAndFrequencyEachTimeOfTheAnswerAlone) {
  const LogitWishes wishes{.presence_penalty = 1, .frequency_penalty = 0.25f};
  EXPECT_THAT(edits(wishes, {}), IsEmpty());
  EXPECT_THAT(edits(wishes, {9, 4, 9, 9}), ElementsAre(Edit{4, 0, 1, 1.25f}, Edit{9, 0, 1, 1.75f}));
  EXPECT_THAT(edits({.frequency_penalty = -2}, {3}), ElementsAre(Edit{3, 0, 1, -2}));
}

TEST(LogitEdits, RepetitionIsOfPromptAndAnswer) {
  EXPECT_THAT(edits({.repetition_penalty = 1.5f, .prompt_tokens = {2, 7}}, {7, 5}),
              ElementsAre(Edit{2, 0, 1.5f, 0}, Edit{5, 0, 1.5f, 0}, Edit{7, 0, 1.5f, 0}));
}

TEST(LogitEdits, ABadWordsLastTokenIsBarredBehindTheOthers) {
  const LogitWishes wishes{.bad_words = {{5}, {1, 2, 3}, {1, 2}}};
  EXPECT_THAT(edits(wishes, {}), ElementsAre(Edit{5, kBarred, 1, 0}));
  EXPECT_THAT(edits(wishes, {8, 1}), ElementsAre(Edit{2, kBarred, 1, 0}, Edit{5, kBarred, 1, 0}));
  EXPECT_THAT(edits(wishes, {1, 2}), ElementsAre(Edit{3, kBarred, 1, 0}, Edit{5, kBarred, 1, 0}));
  EXPECT_THAT(edits(wishes, {1, 2, 1}),
              ElementsAre(Edit{2, kBarred, 1, 0}, Edit{5, kBarred, 1, 0}));
}

TEST(LogitEdits, WhatEndsAnAnswerIsBarredUntilMinTokens) {
  const LogitWishes wishes{.barred_at_first = {2, 30, 2}};
  EXPECT_THAT(edits(wishes, {7}, 2), ElementsAre(Edit{2, kBarred, 1, 0}, Edit{30, kBarred, 1, 0}));
  EXPECT_THAT(edits(wishes, {7, 7}, 2), IsEmpty());
}

TEST(LogitEdits, OfAllowedTokensEachIsNamedAndNoOther) {
  EXPECT_THAT(edits({.frequency_penalty = 1,
                     .bias = {{6, 2}, {7, 2}},
                     .bad_words = {{4}},
                     .allowed = {4, 5, 6}},
                    {5, 7}),
              ElementsAre(Edit{4, kBarred, 1, 0}, Edit{5, 0, 1, 1}, Edit{6, 2, 1, 0}));
}

TEST(LogitEdits, EveryReasonOfATokenCounts) {
  EXPECT_THAT(edits({.repetition_penalty = 2,
                     .presence_penalty = 0.5f,
                     .bias = {{5, -1}},
                     .bad_words = {{6}},
                     .prompt_tokens = {5, 6}},
                    {5, 6}),
              ElementsAre(Edit{5, -1, 2, 0.5f}, Edit{6, kBarred, 2, 0.5f}));
}

}  // namespace
}  // namespace poise
