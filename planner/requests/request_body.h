#pragma once
// The body of a request for /v1/completions or /v1/chat/completions, field by field, with the defaults
// and ranges of vLLM.
// An error is thrown as a BadRequest, which planner/requests/request_line.h turns into an error line; no
// body causes any other exception. Pure functions; any thread may call them.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "common/files/json.h"
#include "common/files/json_file.h"
#include "planner/requests/request_line.h"

namespace poise {

inline constexpr const char* kMissing = "missing_required_parameter";
inline constexpr const char* kInvalid = "invalid_value";
inline constexpr const char* kUnsupported = "unsupported_parameter";

// Thrown and caught within this part of the planner only.
struct BadRequest {
  std::string message;
  std::string param;
  std::string code;
};

// common/files/json_file.h's strict getters, with the name of the field at fault kept for `param`.
class RequestFields {
 public:
  // REQUIRES: `value` is an object; it outlives this.
  explicit RequestFields(const nlohmann::json& value, const std::string& what = "")
      : object_(value, what) {}

  const nlohmann::json* find(std::string_view name) const { return object_.find(name); }
  std::optional<std::int64_t> integer(
      std::string_view name, std::int64_t min,
      std::int64_t max = std::numeric_limits<std::int64_t>::max()) const;
  std::optional<double> number(std::string_view name, double min, double max) const;
  bool flag(std::string_view name, bool absent = false) const;  // `absent` if absent
  std::optional<std::string> string(std::string_view name) const;
  [[noreturn]] void refuse(std::string_view name, const std::string& rule,
                           const char* code = kInvalid) const;

 private:
  JsonObject object_;
};

// Everything of the request but its id and custom_id; the seed is the user's or 0.
Request read_body(const RequestFields& body, const RequestRules& rules);

// The same of a chat request, whose prompt (or why there is none) the supervisor rendered before:
// `entry`, a JSON object of planner/requests/chat_prompts.h.
Request read_chat_body(const RequestFields& body, std::string_view entry,
                       const RequestRules& rules);

// min_p, min_tokens and what becomes SamplingParams::wishes; null if nothing does. `prompt` and
// `sampling`, the rest of it, are final; `asked`: max_tokens, before the context cut it.
void read_wishes(const RequestFields& body, const RequestRules& rules, std::int64_t asked,
                 Request& request);

// "response_format" and "structured_outputs", which become LogitWishes::grammar. `line`: the text that `body` is of. `request`: as the
// functions above left it.
void read_grammar(const RequestFields& body, std::string_view line, const RequestRules& rules,
                  Request& request);

// Refuses fields that would change the answer and that poise does not follow.
void refuse_unsupported(const RequestFields& body);
// The same of those that only a chat request has.
void refuse_unsupported_in_chat(const RequestFields& body);

}  // namespace poise
