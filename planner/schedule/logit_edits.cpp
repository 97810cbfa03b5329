#include "planner/schedule/logit_edits.h"

#include <algorithm>
#include <limits>

namespace poise {
namespace {

constexpr float kBars = -std::numeric_limits<float>::infinity();

// One reason to change a token's logit.
struct Reason {
  TokenId token;
  float bias = 0;
  std::int32_t answered = 0;  // times
  bool seen = false;          // in the prompt or the answer
};

std::vector<Reason> reasons_of(const SamplingParams& sampling, std::span<const TokenId> answer) {
  const LogitWishes& wishes = *sampling.wishes;
  std::vector<Reason> reasons;
  for (const TokenId token : wishes.prompt_tokens) {
    reasons.push_back({.token = token, .seen = true});
  }
  const bool penalised = wishes.repetition_penalty != 1 || wishes.presence_penalty != 0 ||
                         wishes.frequency_penalty != 0;
  for (const TokenId token : penalised ? answer : std::span<const TokenId>()) {
    reasons.push_back({.token = token, .answered = 1, .seen = true});
  }
  for (const auto& [token, bias] : wishes.bias) {
    reasons.push_back({.token = token, .bias = bias});
  }
  for (const std::vector<TokenId>& word : wishes.bad_words) {
    const auto before = std::span(word).first(word.size() - 1);
    if (before.size() <= answer.size() && std::ranges::equal(before, answer.last(before.size()))) {
      reasons.push_back({.token = word.back(), .bias = kBars});
    }
  }
  if (std::ssize(answer) < sampling.min_tokens) {
    for (const TokenId token : wishes.barred_at_first) {
      reasons.push_back({.token = token, .bias = kBars});
    }
  }
  for (const TokenId token : wishes.allowed) {
    reasons.push_back({.token = token});
  }
  std::ranges::stable_sort(reasons, {}, &Reason::token);
  return reasons;
}

}  // namespace

std::vector<messages::LogitEdit> logit_edits(const SamplingParams& sampling,
                                             std::span<const TokenId> answer) {
  std::vector<messages::LogitEdit> edits;
  if (!sampling.wishes) {
    return edits;
  }
  const LogitWishes& wishes = *sampling.wishes;
  const std::vector<Reason> reasons = reasons_of(sampling, answer);
  for (std::size_t i = 0; i < reasons.size();) {
    Reason all = reasons[i];
    for (++i; i < reasons.size() && reasons[i].token == all.token; ++i) {
      all.bias += reasons[i].bias;
      all.answered += reasons[i].answered;
      all.seen = all.seen || reasons[i].seen;
    }
    const float factor = all.seen ? wishes.repetition_penalty : 1;
    const float minus = wishes.frequency_penalty * static_cast<float>(all.answered) +
                        (all.answered > 0 ? wishes.presence_penalty : 0);
    const bool changes = all.bias != 0 || factor != 1 || minus != 0;
    const bool only_some = !wishes.allowed.empty();
    if (only_some ? std::ranges::binary_search(wishes.allowed, all.token) : changes) {
      edits.emplace_back(all.token, all.bias, factor, minus);
    }
  }
  return edits;
}

}  // namespace poise
