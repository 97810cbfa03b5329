#pragma once
// A request as the planner works with it: validated, tokenised, every default filled in. Made by planner/requests/request_file.h from one input
// line; immutable from then on. What has been answered of it: tokens in planner/schedule/schedule.h, text in planner/results/answer.h.

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/units.h"

namespace poise {

struct SamplingParams {
  float temperature = 1;   // 0: greedy
  float top_p = 1;         // (0, 1]
  std::int32_t top_k = 0;  // 0: all
  std::uint64_t seed = 0;  // always set: the user's, or of the run's seed and the line's number
  std::int32_t max_tokens = 16;  // already cut to what the context leaves
  std::int32_t logprobs = -1;    // -1: none; 0..20: best k beside the chosen one
  bool echo = false;             // text and logprobs begin with the prompt's
  bool ignore_eos = false;
  bool return_token_ids = false;
  bool tokens_as_ids = false;  // logprobs name a token "token_id:N"; always so without a tokenizer
  std::vector<std::string> stop;
  std::vector<TokenId> stop_token_ids;

  bool prompt_logprobs() const { return echo && logprobs >= 0; }
};

struct Request {
  RequestId id;  // line of the input file, from 1, blank lines counted
  std::string custom_id;
  std::vector<TokenId> prompt;  // never empty; fits the context
  std::string prompt_text;      // what echo gives back; filled only with echo
  SamplingParams sampling;
  bool chat = false;  // of /v1/chat/completions: the answer is a message

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
