#include "planner/schedule/logit_edits.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <random>
#include <set>
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
  const std::vector<TokenId> kPrompt{7, 2, 7};
  EXPECT_THAT(edits({.repetition_penalty = 1.5f, .constant = constant_wishes(kPrompt, {})}, {7, 5}),
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

TEST(LogitEdits, EveryReasonOfATokenCounts) {
  const std::vector<TokenId> prompt{5, 6};
  const std::vector<std::pair<TokenId, float>> bias{{5, -1}};
  EXPECT_THAT(edits({.repetition_penalty = 2,
                     .presence_penalty = 0.5f,
                     .bad_words = {{6}},
                     .constant = constant_wishes(prompt, bias)},
                    {5, 6}),
              ElementsAre(Edit{5, -1, 2, 0.5f}, Edit{6, kBarred, 2, 0.5f}));
}

// Each token's edit is what follows from its own reasons, one by one.
TEST(LogitEdits, AreThoseOfEachTokenAlone) {
  std::mt19937 random(1);
  const auto some = [&](std::size_t most) {
    std::vector<TokenId> tokens(random() % (most + 1));
    std::ranges::generate(tokens, [&] { return static_cast<TokenId>(random() % 30); });
    return tokens;
  };
  for (int round = 0; round < 300; ++round) {
    const std::vector<TokenId> prompt = some(12), answer = some(12), biased = some(6);
    std::set<TokenId> bars;
    std::map<TokenId, float> bias;
    std::ranges::for_each(biased, [&](TokenId token) { bias[token] = 0.25f * (token % 5 - 2); });
    LogitWishes wishes{.repetition_penalty = round % 2 == 0 ? 1 : 1.5f,
                       .presence_penalty = round % 5 == 0 ? 0 : 0.5f,
                       .frequency_penalty = 0.25f,
                       .barred_at_first = some(3)};
    for (const TokenId token : some(4)) {
      wishes.bad_words.push_back({token});
      bars.insert(token);
    }
    bars.insert(wishes.barred_at_first.begin(), wishes.barred_at_first.end());
    const std::vector<std::pair<TokenId, float>> biases(bias.begin(), bias.end());
    wishes.constant =
        constant_wishes(round % 2 == 0 ? std::vector<TokenId>() : prompt, biases);
    std::vector<Edit> wanted;
    for (TokenId token = 0; token < 30; ++token) {
      const auto times = static_cast<float>(std::ranges::count(answer, token));
      const bool seen = times > 0 || std::ranges::find(prompt, token) != prompt.end();
      const Edit edit{token, bars.contains(token) ? kBarred : bias[token],
                      seen ? wishes.repetition_penalty : 1,
                      times > 0 ? 0.25f * times + wishes.presence_penalty : 0};
      if (edit != Edit{token, 0, 1, 0}) {
        wanted.push_back(edit);
      }
    }
    EXPECT_EQ(edits(wishes, answer, 100), wanted) << "round " << round;
  }
}

}  // namespace
}  // namespace poise
