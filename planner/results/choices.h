#pragma once
// The finished choices of requests that want several ("n"), until the last one of a line has come. Pure bookkeeping, one thread. A planner that takes over computes
// what was kept here again: a choice's tokens follow from its seed.

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "planner/results/answer.h"

namespace poise {

// A finished line.
struct ResultLine {
  RequestId request;
  bool error;
  std::string text;  // without its newline
};

class Choices {
 public:
  // The line, if this was the last of its choices. REQUIRES: the answer is finished, and is of `request`.
  std::optional<ResultLine> add(const Request& request, const Answer& answer,
                                std::span<const TokenId> tokens, const std::string& model_name,
                                std::int64_t created);
  // The same of a choice that has no answer, with its error line: the line's, once all have ended.
  std::optional<ResultLine> fail(const Request& request, std::string error_line);
  // Whether this choice has ended while others of its line have not.
  bool ended(const Request& request) const;
  // Forgets the choices of a line.
  void forget(RequestId line) { lines_.erase(line.n); }

 private:
  struct Line {
    std::vector<std::string> choices;  // by place; of those that have come
    std::vector<bool> ended;           // by place
    std::string beside;                // the choices
    std::size_t tokens = 0;
    std::string error;  // empty: none has failed
  };

  Line& line_of(const Request& request);
  template <typename Text>
  std::optional<ResultLine> end(const Request& request, Line& line, const Text& text);

  std::unordered_map<std::uint32_t, Line> lines_;  // by input line
};

}  // namespace poise
