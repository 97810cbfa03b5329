#include "planner/requests/request_line.h"

#include <algorithm>
#include <utility>

#include "common/files/json_file.h"
#include "common/trouble.h"
#include "planner/requests/request_body.h"

namespace poise {
namespace {

// Bijective and well mixed (the finaliser of splitmix64), so that neighbouring lines share nothing.
std::uint64_t mixed(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

constexpr JsonLimits kLineLimits{kMiB * 64, 64};
constexpr std::size_t kMaxCustomId = 1 << 20;  // bytes; each of a line's choices keeps it

nlohmann::json parsed(const std::string& what, std::string_view text) {
  try {
    return parse_json(text, what, kLineLimits);
  } catch (const Failure& failure) {
    throw BadRequest{failure.what(), "", "invalid_json"};
  }
}

// The line's custom_id goes to `custom_id` as soon as it is known, for the error line's sake.
Request read_line(RequestId line, std::string_view text, const RequestRules& rules,
                  std::string_view chat_entry, std::optional<std::string>& custom_id) {
  const std::string what = fmt::format("line {}", line.n);
  const nlohmann::json document = parsed(what, text);
  if (!document.is_object()) {
    throw BadRequest{fmt::format("{}: a JSON object is needed, not {}", what, described(document)),
                     "", "invalid_json"};
  }
  const RequestFields nameless(document, what);
  custom_id = nameless.string("custom_id");
  if (!custom_id) {
    throw BadRequest{fmt::format("{}: \"custom_id\" is missing", what), "custom_id", kMissing};
  }

  const RequestFields fields(document);
  if (custom_id->empty()) {
    fields.refuse("custom_id", "must not be empty");
  }
  if (custom_id->size() > kMaxCustomId) {
    fields.refuse("custom_id",
                  fmt::format("must have at most {} bytes, not {}", kMaxCustomId, custom_id->size()));
  }
  const auto method = fields.string("method");
  if (!method) {
    throw BadRequest{"\"method\" is missing; it must be \"POST\"", "method", kMissing};
  }
  if (*method != "POST") {
    fields.refuse("method", fmt::format("must be \"POST\", not {}", described(*method)));
  }
  const auto url = fields.string("url");
  if (!url) {
    throw BadRequest{
        "\"url\" is missing; it must be \"/v1/completions\" or \"/v1/chat/completions\"", "url",
        kMissing};
  }
  const bool chat = *url == "/v1/chat/completions";
  if (!chat && *url != "/v1/completions") {
    fields.refuse("url",
                  fmt::format("must be \"/v1/completions\" or \"/v1/chat/completions\", not {}",
                              described(*url)));
  }
  const nlohmann::json* body = fields.find("body");
  if (body == nullptr) {
    throw BadRequest{"\"body\" is missing", "body", kMissing};
  }
  if (!body->is_object()) {
    fields.refuse("body", fmt::format("must be an object, not {}", described(*body)));
  }

  Request request = chat ? read_chat_body(RequestFields(*body), chat_entry, rules)
                         : read_body(RequestFields(*body), rules);
  read_grammar(RequestFields(*body), text, rules, request);
  request.id = line;
  request.custom_id = *custom_id;
  if (!body->contains("seed") || body->at("seed").is_null()) {
    request.sampling.seed = derived_seed(rules.run_seed, line);
  }
  return request;
}

}  // namespace

ParsedLine parse_request(RequestId line, std::string_view text, const RequestRules& rules,
                         std::string_view chat_entry) {
  std::optional<std::string> custom_id;
  try {
    return read_line(line, text, rules, chat_entry, custom_id);
  } catch (BadRequest& bad) {
    return RequestError{line, std::move(custom_id), std::move(bad.message), std::move(bad.param),
                        std::move(bad.code)};
  }
}

void add_choices(Request request, const std::function<RequestId()>& further,
                 std::vector<Request>& requests) {
  const RequestId line = request.id;
  const std::int32_t choices = request.choices;
  const std::uint64_t seed = request.sampling.seed;
  requests.push_back(std::move(request));
  for (std::int32_t choice = 1; choice < choices; ++choice) {
    Request& one = requests.emplace_back(requests.back());
    one.id = further();
    one.first_choice = line;
    one.choice = choice;
    one.sampling.seed = seed + static_cast<std::uint64_t>(choice);
  }
}

std::uint64_t derived_seed(std::uint64_t run_seed, RequestId line) {
  return mixed(mixed(run_seed) ^ line.n);
}

}  // namespace poise
