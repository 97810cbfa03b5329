#include "planner/requests/chat_prompts.h"

#include <charconv>
#include <utility>

#include "common/files/json_file.h"
#include "common/trouble.h"

namespace poise {
namespace {

constexpr Bytes kLongestEntry = kMiB * 128;
constexpr std::string_view kBegin = "{\"line\": ";

}  // namespace

ChatPrompts::ChatPrompts(const std::optional<std::filesystem::path>& path) {
  if (!path) {
    return;
  }
  what_ = shown(path->string(), 300);
  lines_.emplace(*path, kLongestEntry);
  const auto header = lines_->next();
  const nlohmann::json document = parse_json(header ? header->text : "", what_);
  const JsonObject object(document, what_);
  if (object.integer("version", {}).value_or(0) != 1) {
    object.refuse("version", "must be 1: it was written by another build");
  }
  input_ = object.string("input").value_or("");
  advance();
}

std::string ChatPrompts::of(RequestId line) {
  while (next_ && next_->n < line.n) {
    advance();
  }
  if (!next_ || next_->n != line.n) {
    return {};
  }
  std::string entry = std::move(entry_);
  advance();
  return entry;
}

void ChatPrompts::check_input(const std::string& digest) const {
  if (lines_ && digest != input_) {
    fail("{} holds prompts of another input; start the run again", what_);
  }
}

// The line's number is read from the entry's beginning; the rest is parsed with the input's line.
void ChatPrompts::advance() {
  auto line = lines_->next();
  next_.reset();
  if (!line) {
    return;
  }
  RequestId number;
  const char* end = line->text.data() + line->text.size();
  const bool begins = line->text.starts_with(kBegin);
  if (!begins || line->too_long ||
      std::from_chars(line->text.data() + kBegin.size(), end, number.n).ec != std::errc()) {
    fail("{} is damaged at line {}; start the run again", what_, line->number.n);
  }
  next_ = number;
  entry_ = std::move(line->text);
}

}  // namespace poise
