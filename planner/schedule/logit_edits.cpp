#include "planner/schedule/logit_edits.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace poise {
namespace {

constexpr float kBars = -std::numeric_limits<float>::infinity();

// One reason to change a token's logit at one place of the answer.
struct Reason {
  TokenId token;
  float bias = 0;
  std::int32_t answered = 0;  // times
};

// By token. Those that hold at every place are LogitWishes::constant.
std::vector<Reason> reasons_here(const SamplingParams& sampling, std::span<const TokenId> answer) {
  const LogitWishes& wishes = *sampling.wishes;
  std::vector<Reason> reasons;
  for (const TokenId token : wishes.penalises() ? answer : std::span<const TokenId>()) {
    reasons.push_back({.token = token, .answered = 1});
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
  std::ranges::sort(reasons, {}, &Reason::token);
  return reasons;
}

class EditList {
 public:
  EditList(const LogitWishes& wishes, std::size_t room) : wishes_(wishes) { edits_.reserve(room); }

  // `constant` and `here` are of the same token.
  void add(const ConstantWish& constant, const Reason& here) {
    const bool seen = constant.in_prompt || here.answered > 0;
    const float bias = constant.bias + here.bias;
    const float factor = seen ? wishes_.repetition_penalty : 1;
    const float minus = wishes_.frequency_penalty * static_cast<float>(here.answered) +
                        (here.answered > 0 ? wishes_.presence_penalty : 0);
    if (bias != 0 || factor != 1 || minus != 0) {
      edits_.emplace_back(constant.token, bias, factor, minus);
    }
  }
  std::vector<messages::LogitEdit> take() { return std::move(edits_); }

 private:
  const LogitWishes& wishes_;
  std::vector<messages::LogitEdit> edits_;
};

}  // namespace

std::vector<messages::LogitEdit> logit_edits(const SamplingParams& sampling,
                                             std::span<const TokenId> answer) {
  if (!sampling.wishes) {
    return {};
  }
  const LogitWishes& wishes = *sampling.wishes;
  const std::vector<Reason> reasons = reasons_here(sampling, answer);
  EditList edits(wishes, wishes.constant.size() + reasons.size());
  auto constant = wishes.constant.begin();
  for (auto reason = reasons.begin(); reason != reasons.end();) {
    Reason here = *reason;
    for (++reason; reason != reasons.end() && reason->token == here.token; ++reason) {
      here.bias += reason->bias;
      here.answered += reason->answered;
    }
    for (; constant != wishes.constant.end() && constant->token < here.token; ++constant) {
      edits.add(*constant, {.token = constant->token});
    }
    if (constant != wishes.constant.end() && constant->token == here.token) {
      edits.add(*constant++, here);
    } else {
      edits.add({.token = here.token}, here);
    }
  }
  for (; constant != wishes.constant.end(); ++constant) {
    edits.add(*constant, {.token = constant->token});
  }
  return edits.take();
}

}  // namespace poise
