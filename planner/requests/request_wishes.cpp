// The fields of a request that change logits before a token is drawn. Names, ranges and meaning are vLLM's
// (its SamplingParams and its validation of them).

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <utility>

#include "common/device_memory.h"
#include "common/trouble.h"
#include "planner/requests/request_body.h"
#include "planner/tokenizer/tokenizer.h"

namespace poise {
namespace {

constexpr std::size_t kMaxBiases = 1 << 16;
constexpr std::size_t kMaxBadWords = 1024;  // each is compared with the answer at every token
constexpr double kMostBias = 100;           // OpenAI's bound, to which vLLM clamps

float penalty(const RequestFields& body, const char* name) {
  return static_cast<float>(body.number(name, -2, 2).value_or(0));
}

float repetition_penalty(const RequestFields& body) {
  const double asked =
      body.number("repetition_penalty", 0, static_cast<double>(std::numeric_limits<float>::max()))
          .value_or(1);
  const auto factor = static_cast<float>(asked);
  if (!std::isnormal(factor)) {
    body.refuse("repetition_penalty",
                fmt::format("must be at least {:g}, not {}", std::numeric_limits<float>::min(), asked));
  }
  return factor;
}

void check_id(const RequestFields& body, const char* name, std::optional<std::int64_t> id,
              const std::string& shown, const RequestRules& rules) {
  if (!id || *id < 0 || *id >= rules.vocab_size) {
    body.refuse(
        name, fmt::format("must hold token ids from 0 to {}, not {}", rules.vocab_size - 1, shown));
  }
}

// Each token has one key: "01" and "-0" are none.
std::optional<std::int64_t> id_of_key(const std::string& key) {
  std::int64_t id = 0;
  std::from_chars(key.data(), key.data() + key.size(), id);
  return std::to_string(id) == key ? std::optional(id) : std::nullopt;
}

std::vector<std::pair<TokenId, float>> read_bias(const RequestFields& body,
                                                 const RequestRules& rules) {
  const nlohmann::json* map = body.find("logit_bias");
  std::vector<std::pair<TokenId, float>> bias;
  if (map == nullptr) {
    return bias;
  }
  if (!map->is_object() || map->size() > kMaxBiases) {
    body.refuse(
        "logit_bias",
        map->is_object()
            ? fmt::format("must name at most {} tokens, not {}", kMaxBiases, map->size())
            : fmt::format("must be an object of token ids and numbers, not {}", described(*map)));
  }
  for (const auto& [key, value] : map->items()) {
    const auto id = id_of_key(key);
    check_id(body, "logit_bias", id, described(nlohmann::json(key)), rules);
    if (!value.is_number()) {
      body.refuse("logit_bias",
                  fmt::format("must give token {} a number, not {}", *id, described(value)));
    }
    bias.emplace_back(static_cast<TokenId>(*id),
                      static_cast<float>(std::clamp(value.get<double>(), -kMostBias, kMostBias)));
  }
  return bias;
}

// As a mask: a bit for each token of the vocabulary.
std::vector<std::uint32_t> read_allowed(const RequestFields& body, const RequestRules& rules) {
  const nlohmann::json* list = body.find("allowed_token_ids");
  if (list == nullptr) {
    return {};
  }
  if (!list->is_array() || list->empty()) {
    body.refuse("allowed_token_ids",
                fmt::format("must be a list of at least one token id, not {}",
                            list->is_array() ? "an empty list" : described(*list)));
  }
  std::vector<std::uint32_t> allowed(static_cast<std::size_t>(mask_words(rules.vocab_size)));
  for (const nlohmann::json& element : *list) {
    const auto id = as_integer(element);
    check_id(body, "allowed_token_ids", id, described(element), rules);
    allowed[static_cast<std::size_t>(*id / 32)] |= std::uint32_t{1} << (*id % 32);
  }
  return allowed;
}

// As a word at the beginning of a text, and, where that is another first token, behind a space.
void add_bad_word(const RequestFields& body, std::string_view word, const RequestRules& rules,
                  std::vector<std::vector<TokenId>>& words) {
  word.remove_prefix(std::min(word.find_first_not_of(" \t\n\v\f\r"), word.size()));
  for (const bool behind_space : {false, true}) {
    std::vector<TokenId> tokens;
    try {
      tokens = rules.tokenizer->encode((behind_space ? " " : "") + std::string(word), false);
    } catch (const Failure& failure) {
      throw BadRequest{failure.what(), "bad_words", kInvalid};
    }
    for (const TokenId id : tokens) {
      check_id(body, "bad_words", id, fmt::format("one with token {}", id), rules);
    }
    if (tokens.empty() && !behind_space) {
      body.refuse("bad_words", "must hold words of at least one token");
    }
    if (!behind_space || (!tokens.empty() && tokens.front() != words.back().front() &&
                          tokens.size() == words.back().size())) {
      words.push_back(std::move(tokens));
    }
  }
}

std::vector<std::vector<TokenId>> read_bad_words(const RequestFields& body,
                                                 const RequestRules& rules) {
  const nlohmann::json* list = body.find("bad_words");
  std::vector<std::vector<TokenId>> words;
  if (list == nullptr || (list->is_array() && list->empty())) {
    return words;
  }
  if (!list->is_array() || list->size() > kMaxBadWords) {
    body.refuse("bad_words",
                list->is_array()
                    ? fmt::format("must hold at most {} words, not {}", kMaxBadWords, list->size())
                    : fmt::format("must be a list of strings, not {}", described(*list)));
  }
  if (rules.tokenizer == nullptr) {
    body.refuse("bad_words", "needs a tokenizer: the run has none (--skip-tokenizer-init)");
  }
  for (const nlohmann::json& word : *list) {
    if (!word.is_string() || word.get_ref<const std::string&>().empty()) {
      body.refuse("bad_words",
                  word.is_string()
                      ? "must not hold an empty string"
                      : fmt::format("must be a list of strings, not one with {}", described(word)));
    }
    add_bad_word(body, word.get_ref<const std::string&>(), rules, words);
  }
  return words;
}

}  // namespace

std::vector<ConstantWish> constant_wishes(std::span<const TokenId> prompt,
                                          std::span<const std::pair<TokenId, float>> bias) {
  std::vector<ConstantWish> all;
  for (const TokenId token : prompt) {
    all.push_back({.token = token, .in_prompt = true});
  }
  for (const auto& [token, by] : bias) {
    if (by != 0) {
      all.push_back({.token = token, .bias = by});
    }
  }
  std::ranges::sort(all, {}, &ConstantWish::token);
  std::size_t kept = 0;
  for (const ConstantWish& one : all) {
    if (kept > 0 && all[kept - 1].token == one.token) {
      all[kept - 1].bias += one.bias;
      all[kept - 1].in_prompt = all[kept - 1].in_prompt || one.in_prompt;
    } else {
      all[kept++] = one;
    }
  }
  all.resize(kept);
  all.shrink_to_fit();
  return all;
}

void read_wishes(const RequestFields& body, const RequestRules& rules, std::int64_t asked,
                 Request& request) {
  SamplingParams& sampling = request.sampling;
  sampling.min_p = static_cast<float>(body.number("min_p", 0, 1).value_or(0));
  const std::int64_t least = body.integer("min_tokens", 0).value_or(0);
  if (least > asked) {
    body.refuse("min_tokens",
                fmt::format("must be at most the {} of max_tokens, not {}", asked, least));
  }
  sampling.min_tokens =
      static_cast<std::int32_t>(std::min<std::int64_t>(least, sampling.max_tokens));
  LogitWishes wishes{.repetition_penalty = repetition_penalty(body),
                     .presence_penalty = penalty(body, "presence_penalty"),
                     .frequency_penalty = penalty(body, "frequency_penalty"),
                     .bad_words = read_bad_words(body, rules),
                     .allowed = read_allowed(body, rules)};
  if (sampling.min_tokens > 0) {
    wishes.barred_at_first.assign(rules.eos.begin(), rules.eos.end());
    std::ranges::copy(sampling.stop_token_ids, std::back_inserter(wishes.barred_at_first));
    std::erase_if(wishes.barred_at_first, [&](TokenId id) { return id >= rules.vocab_size; });
  }
  const bool repetition = wishes.repetition_penalty != 1;
  wishes.constant = constant_wishes(repetition ? std::span(request.prompt.get()) : std::span<const TokenId>(),
                                    read_bias(body, rules));
  wishes.mask_edits = wishes.allowed.empty() ? 0 : mask_edits(rules.vocab_size);
  if (wishes.penalises() || wishes.most_edits(0) > 0) {
    sampling.wishes = std::make_shared<const LogitWishes>(std::move(wishes));
  }
}

}  // namespace poise
