#pragma once
// One input line turned into a Request or into the reason why it is none: an OpenAI batch line whose
// body is a request for /v1/completions or /v1/chat/completions, read as vLLM reads it. Every type and range is checked. A field
// that poise does not implement is an error if ignoring it would change the answer, and ignored
// otherwise. Messages name the field and the rule and are the same on each run. Pure functions;
// any thread may call them.

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "planner/requests/request.h"

namespace poise {

class Tokenizer;

// Why a line has no answer; what an error line says (planner/results/result_line.h).
struct RequestError {
  RequestId line;
  std::optional<std::string> custom_id;  // where it could be read
  std::string message;
  std::string param;  // the field at fault; empty where it is the line as a whole
  std::string code;   // for programs: "invalid_value", "context_length_exceeded" …
  int status = 400;
};

// What a line is checked against.
struct RequestRules {
  std::int32_t context = 0;              // tokens of prompt and answer together
  std::int32_t vocab_size = 0;           // rows of the model's embedding: ids lie below
  const Tokenizer* tokenizer = nullptr;  // null with --skip-tokenizer-init
  std::uint64_t run_seed = 0;
  std::span<const TokenId> eos = {};  // barred until min_tokens are answered
  std::string model = "";  // its served name; empty: any name is accepted
};

using ParsedLine = std::variant<Request, RequestError>;

// `text` is one line without its newline, not blank. `chat_entry`: of a chat line, what
// planner/requests/chat_prompts.h has for it; empty: nothing.
ParsedLine parse_request(RequestId line, std::string_view text, const RequestRules& rules,
                         std::string_view chat_entry = {});

// Appends a request for each choice that the line wants, the first one under its own id and each further one under a `further` one. Seeds
// as in vLLM: the request's and the numbers behind it.
void add_choices(Request request, const std::function<RequestId()>& further,
                 std::vector<Request>& requests);

// The seed of a request that names none: the same in every run with the same seed.
std::uint64_t derived_seed(std::uint64_t run_seed, RequestId line);

}  // namespace poise
