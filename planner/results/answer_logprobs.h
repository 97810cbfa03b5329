#pragma once
// The `logprobs` object of a completion: {"tokens", "token_logprobs", "top_logprobs",
// "text_offset"}, one entry a token; with echo the prompt's come first, the very first null. Pure
// function; any thread may call it.

#include <string>
#include <vector>

#include "planner/requests/request.h"

namespace poise {

class Tokenizer;

// Appends the object to `out`. `prompt_values` (prompt tokens but the first) only with echo;
// `values` of the answer's tokens. `tokenizer` may be null: tokens are named by their ids then.
void append_logprobs(std::string& out, const Request& request, const Tokenizer* tokenizer,
                     const std::vector<TokenValue>& prompt_values,
                     const std::vector<TokenValue>& values);

}  // namespace poise
