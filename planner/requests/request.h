#pragma once
// A request as the planner works with it: validated, tokenised, every default filled in. Made by planner/requests/request_file.h from one input
// line; immutable from then on. What has been answered of it: tokens in planner/schedule/schedule.h, text in planner/results/answer.h.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/units.h"
#include "planner/requests/shared_value.h"

namespace poise {

// What one token's logit gets at every place of an answer.
struct ConstantWish {
  TokenId token;
  float bias = 0;
  bool in_prompt = false;  // with repetition_penalty

  friend bool operator==(const ConstantWish&, const ConstantWish&) = default;
};
// Of tokens of the prompt and biases, as LogitWishes has them.
std::vector<ConstantWish> constant_wishes(std::span<const TokenId> prompt,
                                          std::span<const std::pair<TokenId, float>> bias);
// What every answer of a request must be (planner/requests/request_grammar.cpp).
struct Grammar {
  std::string param;  // the field that asks for it
  std::string text;  // {"response_format": …} or {"structured_outputs": …}, in the line's own order
};

// What happens to the logits before a token is drawn, beside temperature and cuts: vLLM's fields of these names, in tokens.
struct LogitWishes {
  float repetition_penalty = 1;  // of tokens of the prompt and the answer
  float presence_penalty = 0;    // of the answer's, once
  float frequency_penalty = 0;   // … each time
  std::vector<std::vector<TokenId>>
      bad_words;                         // the last token of each is barred behind the others
  std::vector<std::uint32_t> allowed;    // a bit for each token of the vocabulary; empty: all
  std::vector<TokenId> barred_at_first;  // until min_tokens are answered: EOS and stop ids
  std::vector<ConstantWish> constant;    // sorted, each token once
  std::shared_ptr<const Grammar> grammar;  // null: the answer is free
  std::int32_t mask_edits = 0;  // with a mask: its room, in edits (common/device_memory.h)

  bool penalises() const {
    return repetition_penalty != 1 || presence_penalty != 0 || frequency_penalty != 0;
  }
  // Edits of logits of this request's samples at most.
  std::int32_t most_edits(std::int32_t max_tokens) const;
};

struct SamplingParams {
  float temperature = 1;   // 0: greedy
  float top_p = 1;         // (0, 1]
  std::int32_t top_k = 0;  // 0: all
  std::uint64_t seed = 0;  // always set: the user's, or of the run's seed and the line's number
  std::int32_t max_tokens = 16;  // already cut to what the context leaves
  float min_p = 0;               // [0, 1]
  std::int32_t min_tokens = 0;   // at least, at most max_tokens
  std::int32_t logprobs = -1;    // -1: none; 0..20: best k beside the chosen one
  std::int32_t prompt_top = -1;  // of the prompt's tokens the best k, too; -1: none
  std::int32_t score_from = 0;   // tokens from this place on are scored, nothing else; 0: not
  std::int32_t score_best = 0;   // … and at the last of them the best k are reported, too
  bool echo = false;             // text and logprobs begin with the prompt's
  bool ignore_eos = false;
  bool return_token_ids = false;
  bool tokens_as_ids = false;  // logprobs name a token "token_id:N"; always so without a tokenizer
  bool include_stop = false;   // the text ends with the stop string or stop token, not before it
  bool keep_special = false;   // special tokens are text
  SharedValue<std::vector<std::string>> stop;
  SharedValue<std::vector<TokenId>> stop_token_ids;
  std::shared_ptr<const LogitWishes> wishes;  // null: none, as of nearly all requests

  bool prompt_logprobs() const { return prompt_top >= 0 || (echo && logprobs >= 0); }
  // Best k that are reported of the prompt's tokens.
  std::int32_t prompt_best() const { return prompt_top >= 0 ? prompt_top : logprobs; }
};

inline constexpr std::int32_t kMostChoices = 128;
// From here on ids are of the further choices of lines that want several.
inline constexpr std::uint32_t kFirstFurtherChoice = 1u << 31;

struct Request {
  // Line of the input file, from 1, blank lines counted; of a further choice an id of its own.
  RequestId id;
  SharedValue<std::string> custom_id;
  SharedValue<std::vector<TokenId>> prompt;  // never empty; fits the context
  SharedValue<std::string> prompt_text;      // what echo gives back; filled only with echo
  SamplingParams sampling;
  TokenId scored_last = -1;  // with score_from: the token behind the prompt, scored and never fed
  bool chat = false;         // of /v1/chat/completions: the answer is a message
  std::int32_t choice = 0, choices = 1;  // which of how many answers of the line this is
  RequestId first_choice{};              // of a further choice: the line's

  RequestId line() const { return choice == 0 ? id : first_choice; }

  // The token at this place of the prompt, or behind it the one that is only scored.
  TokenId token_or_scored(std::size_t place) const {
    return place < prompt.size() ? prompt[place] : scored_last;
  }
  // With prompt_logprobs(): the first place that has a value, and how many have one.
  std::size_t first_valued() const {
    return static_cast<std::size_t>(std::max(sampling.score_from, 1));
  }
  std::size_t valued() const { return given_tokens() - first_valued(); }
  // Tokens that the line gave.
  std::size_t given_tokens() const { return prompt.size() + (sampling.score_from > 0 ? 1 : 0); }

  // Tokens of context at most: the last token sampled is never fed back.
  std::int32_t most_context() const {
    return static_cast<std::int32_t>(prompt.size()) +
           (sampling.max_tokens > 0 ? sampling.max_tokens - 1 : 0);
  }
};

// What the executor reports of one position of an answer or an echoed prompt, beside its token.
struct TokenLogprobs {
  float logprob = 0;                           // of that token
  std::vector<std::pair<TokenId, float>> top;  // best first

  friend bool operator==(const TokenLogprobs&, const TokenLogprobs&) = default;
};

}  // namespace poise
