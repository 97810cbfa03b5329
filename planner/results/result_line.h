#pragma once
// Result lines, as OpenAI's batch API and `vllm run-batch` write them:
// {"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}. Ids carry the
// number of the input line, so that a resumed run can tell what is done even where custom_id is
// null. Pure functions; no clock, any thread may call them.

#include <string>
#include <string_view>

#include "planner/requests/request_line.h"

namespace poise {

// `body` is the JSON text of a completion. Lines come without their newline.
std::string answered_line(RequestId line, const std::string& custom_id, std::string_view body);
// The error stands where OpenAI's clients look for it: response.body.error; "error" itself is null.
std::string error_line(const RequestError& error);

// The id of a completion, for its body: "cmpl-12", of a chat's "chatcmpl-12".
std::string completion_id(RequestId line, bool chat = false);

// What a result line says of itself.
struct ResultMark {
  RequestId line;
  bool error = false;  // an error line, not an answer
};
// Fails, beginning with `what`, if `text` is no result line of ours.
ResultMark read_result_line(std::string_view text, const std::string& what);

}  // namespace poise
