#pragma once
// What the supervisor rendered of an input file's chat lines with the model's template, for the planner
// has no Python (launch/supervisor/lifecycle/chat_prompts.py). A file of JSON lines: first
// {"version", "input"}, the SHA-256 of the input; then for each chat line, in the input's order,
// {"line", "prompt"} or {"line", "error", "param", "code"}. Read beside the input, one entry at a time.

#include <filesystem>
#include <optional>
#include <string>

#include "planner/requests/request_lines.h"

namespace poise {

class ChatPrompts {
 public:
  // Without a path there are none. Fails if the file cannot be read.
  explicit ChatPrompts(const std::optional<std::filesystem::path>& path);

  // The entry of `line`, as JSON text; empty if it has none. REQUIRES: lines in ascending order.
  std::string of(RequestId line);
  // Fails if the input, whose digest this is, is not the one that was rendered.
  void check_input(const std::string& digest) const;

 private:
  void advance();

  std::string what_, input_;
  std::optional<RequestLines> lines_;
  std::optional<RequestId> next_;  // the line of `entry_`
  std::string entry_;
};

}  // namespace poise
