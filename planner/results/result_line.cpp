#include "planner/results/result_line.h"

#include <charconv>

#include "common/files/json_file.h"
#include "common/trouble.h"
#include "planner/results/result_json.h"

namespace poise {
namespace {

constexpr std::string_view kIdPrefix = "poise-";
constexpr JsonLimits kResultLimits{kGiB, 64};

std::string line_of(RequestId line, const std::optional<std::string>& custom_id, int status,
                    std::string_view body) {
  std::string out;
  out.reserve(body.size() + 160 + (custom_id ? custom_id->size() : 0));
  out += fmt::format("{{\"id\":\"{}{}\",\"custom_id\":", kIdPrefix, line.n);
  if (custom_id) {
    append_json_text(out, *custom_id);
  } else {
    out += "null";
  }
  out += fmt::format(
      ",\"response\":{{\"status_code\":{},\"request_id\":\"req-{}\",\"body\":", status, line.n);
  out += body;
  out += "},\"error\":null}";
  return out;
}

// The status says whether the request or the service was at fault, and so does OpenAI's type.
const char* error_type(int status) {
  return status < 500 ? "invalid_request_error" : "server_error";
}

std::optional<RequestId> line_number(std::string_view id) {
  if (!id.starts_with(kIdPrefix)) {
    return std::nullopt;
  }
  id.remove_prefix(kIdPrefix.size());
  RequestId line;
  const auto [end, error] = std::from_chars(id.data(), id.data() + id.size(), line.n);
  if (error != std::errc() || end != id.data() + id.size() || line.n == 0 || id.front() == '0') {
    return std::nullopt;
  }
  return line;
}

}  // namespace

std::string completion_id(RequestId line, bool chat) {
  return fmt::format("{}cmpl-{}", chat ? "chat" : "", line.n);
}

std::string answered_line(RequestId line, const std::string& custom_id, std::string_view body) {
  return line_of(line, custom_id, 200, body);
}

std::string error_line(const RequestError& error) {
  std::string body = "{\"error\":{\"message\":";
  append_json_text(body, error.message);
  body += fmt::format(",\"type\":\"{}\",\"param\":", error_type(error.status));
  if (error.param.empty()) {
    body += "null";
  } else {
    append_json_text(body, error.param);
  }
  body += ",\"code\":";
  append_json_text(body, error.code);
  body += "}}";
  return line_of(error.line, error.custom_id, error.status, body);
}

ResultMark read_result_line(std::string_view text, const std::string& what) {
  const nlohmann::json document = parse_json(text, what, kResultLimits);
  const JsonObject object(document, what);
  const auto id = object.string("id");
  const auto line = id ? line_number(*id) : std::nullopt;
  if (!line) {
    object.refuse("id", fmt::format("must be \"{}\" and the number of an input line", kIdPrefix));
  }
  const auto response = object.object("response");
  const auto status = response ? response->integer("status_code", {100, 599}) : std::nullopt;
  if (!status || !response->object("body")) {
    object.refuse("response", "must hold \"status_code\" and \"body\"");
  }
  return {*line, *status != 200};
}

}  // namespace poise
