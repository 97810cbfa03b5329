#include "planner/requests/request_sizes.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <string_view>
#include <variant>

#include "common/trouble.h"
#include "planner/requests/chat_prompts.h"
#include "planner/requests/request_lines.h"

namespace poise {
namespace {

constexpr std::int64_t kReadInFull = 512;  // lines
constexpr std::string_view kBlank = " \t";
// Fields that change the sizes of a request, beside its prompt and max_tokens.
constexpr std::array<std::string_view, 11> kNotPlain{"\"echo\"",
                                                     "_penalty\"",
                                                     "\"logit_bias\"",
                                                     "\"bad_words\"",
                                                     "\"min_tokens\"",
                                                     "\"allowed_token_ids\"",
                                                     "\"truncate_prompt_tokens\"",
                                                     "\"score_from\"",
                                                     "\"response_format\"",
                                                     "\"structured_outputs\"",
                                                     "\"n\""};

// What follows a name that stands once in the line, behind its colon; nothing otherwise.
std::optional<std::string_view> value_of(std::string_view line, std::string_view name) {
  const std::size_t at = line.find(name);
  if (at == line.npos || line.find(name, at + name.size()) != line.npos) {
    return std::nullopt;
  }
  std::size_t begin = line.find_first_not_of(kBlank, at + name.size());
  if (begin == line.npos || line[begin] != ':') {
    return std::nullopt;
  }
  begin = line.find_first_not_of(kBlank, begin + 1);
  return begin == line.npos ? std::nullopt : std::optional(line.substr(begin));
}

std::optional<std::int32_t> whole_number(std::string_view text) {
  std::int64_t number = 0;
  std::size_t digits = 0;
  for (; digits < text.size() && text[digits] >= '0' && text[digits] <= '9' && digits < 9;
       ++digits) {
    number = 10 * number + (text[digits] - '0');
  }
  const bool ends = digits > 0 && digits < text.size() &&
                    std::string_view(",} \t").find(text[digits]) != std::string_view::npos;
  return ends ? std::optional(static_cast<std::int32_t>(number)) : std::nullopt;
}

struct Plain {
  std::int64_t ids = 0;         // of a prompt given as ids
  std::int64_t text_bytes = 0;  // of one given as text
  std::int32_t max_tokens = 0;
};

// Nothing where the line is not written as nearly all are.
std::optional<Plain> plain_sizes(std::string_view line, bool chat) {
  const auto prompt = value_of(line, "\"prompt\"");
  const auto limit = value_of(line, "\"max_tokens\"");
  const auto max_tokens = limit ? whole_number(*limit) : std::nullopt;
  const bool other = std::ranges::any_of(
      kNotPlain, [&](std::string_view name) { return line.find(name) != line.npos; });
  if (chat || !prompt || !max_tokens || other) {
    return std::nullopt;
  }
  Plain plain{.max_tokens = *max_tokens};
  if (prompt->front() == '[') {
    const std::size_t end = prompt->find_first_of("]\"", 1);
    const std::string_view ids = prompt->substr(1, end == prompt->npos ? 0 : end - 1);
    const bool numbers = end != prompt->npos && (*prompt)[end] == ']' &&
                         ids.find('[') == ids.npos && ids.find_first_not_of(kBlank) != ids.npos;
    plain.ids = 1 + std::count(ids.begin(), ids.end(), ',');
    return numbers ? std::optional(plain) : std::nullopt;
  }
  if (prompt->front() != '"') {
    return std::nullopt;
  }
  std::size_t end = 1;
  for (; end < prompt->size() && (*prompt)[end] != '"'; ++end) {
    end += (*prompt)[end] == '\\' ? 1 : 0;
  }
  plain.text_bytes = static_cast<std::int64_t>(end) - 1;
  return plain.text_bytes > 0 ? std::optional(plain) : std::nullopt;
}

// As it stands, or with the number of its line before it.
std::string refusal_of(const RequestError& error) {
  const std::string line = fmt::format("line {}: ", error.line.n);
  return error.message.starts_with(line) ? error.message : line + error.message;
}

}  // namespace

RequestSizes read_request_sizes(const std::filesystem::path& path, const RequestRules& rules,
                                const std::optional<std::filesystem::path>& chat_prompts) {
  RequestSizes sizes;
  RequestLines lines(path);
  ChatPrompts prompts(chat_prompts);
  double text_bytes = 0, text_tokens = 0;
  for (std::int64_t count = 0; auto line = lines.next(); ++count) {
    const std::string entry = prompts.of(line->number);
    const auto plain = plain_sizes(line->text, !entry.empty());
    const bool unknown = plain && plain->ids == 0 && text_bytes == 0;
    if (!plain || unknown || count < kReadInFull) {
      const ParsedLine parsed = parse_request(line->number, line->text, rules, entry);
      const auto* request = std::get_if<Request>(&parsed);
      if (line->too_long || request == nullptr) {
        if (sizes.refused++ == 0 && request == nullptr) {
          sizes.first_refusal = refusal_of(std::get<RequestError>(parsed));
        }
        continue;
      }
      sizes.requests.insert(sizes.requests.end(), static_cast<std::size_t>(request->choices),
                            size_of(*request));
      if (plain && plain->ids == 0) {
        text_bytes += static_cast<double>(plain->text_bytes);
        text_tokens += sizes.requests.back().prompt;
      }
      continue;
    }
    std::int64_t prompt = plain->ids;
    if (prompt == 0) {
      sizes.estimated = true;
      prompt = std::max<std::int64_t>(
          1, std::llround(static_cast<double>(plain->text_bytes) * text_tokens / text_bytes));
    }
    const std::int64_t room = rules.context - prompt;
    if (room <= 0 || plain->max_tokens <= 0) {
      ++sizes.refused;
      continue;
    }
    sizes.requests.push_back(
        {.id = line->number,
         .prompt = static_cast<std::int32_t>(prompt),
         .answer = static_cast<std::int32_t>(std::min<std::int64_t>(room, plain->max_tokens))});
  }
  return sizes;
}

}  // namespace poise
