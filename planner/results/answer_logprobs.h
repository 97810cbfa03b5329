#pragma once
// The `logprobs` object of a completion: {"tokens", "token_logprobs", "top_logprobs",
// "text_offset"}, one entry a token; with echo the prompt's come first, the very first null. And that
// of a chat's answer: {"content": [{"token", "bytes", "logprob", "top_logprobs"}]}. Pure functions; any
// thread may call them.

#include <span>
#include <string>

#include "planner/requests/request.h"

namespace poise {

class Tokenizer;

// Appends the object to `out`. `prompt_values` (of the prompt's tokens but the first) only with echo;
// `values` are of the answer's `tokens`. `tokenizer` may be null: tokens are named by their ids then.
void append_logprobs(std::string& out, const Request& request, const Tokenizer* tokenizer,
                     std::span<const TokenLogprobs> prompt_values, std::span<const TokenId> tokens,
                     std::span<const TokenLogprobs> values);
// vLLM's `prompt_logprobs`: null, then for each further token of the prompt an object of ids, each with "logprob", "rank" and
// "decoded_token": the token itself, and the best. The rank of a token that is not among the best is null.
void append_prompt_logprobs(std::string& out, const Request& request, const Tokenizer* tokenizer,
                            std::span<const TokenLogprobs> prompt_values);
// Of a request with score_from: {"logprobs", "best"}, an entry for each value; "best" says whether no token was likelier. With
// score_best also "last": {id: logprob} of the best at the last place. REQUIRES: `values` are all that the request has.
void append_scores(std::string& out, const Request& request, std::span<const TokenLogprobs> values);
void append_chat_logprobs(std::string& out, const Request& request, const Tokenizer* tokenizer,
                          std::span<const TokenId> tokens, std::span<const TokenLogprobs> values);

}  // namespace poise
