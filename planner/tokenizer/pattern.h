#pragma once
// A regular expression out of a tokenizer.json, matched as Oniguruma matches it for HuggingFace's
// `tokenizers`: leftmost, alternatives in order, its Unicode tables. Of the syntax it takes what
// pre-tokenizers use (characters, classes, \s \d \w \p{..}, groups, (?i:..), look-ahead, greedy,
// lazy and possessive repeats) and refuses the rest by name, for where two engines read one
// expression differently, one of them cuts the text wrongly. Matching counts its steps and gives up
// with a sentence when they grow faster than the text: no expression can make it hang.
// Immutable after compile(); any number of threads may match at once.

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace poise {

struct PatternProgram;

class Pattern {
 public:
  struct Match {
    std::size_t begin, end;  // bytes
  };

  // Fails, naming `what` (a file and a place in it), if `expression` is malformed or unsupported.
  static Pattern compile(std::string_view expression, const std::string& what);
  // Matches `text` itself.
  static Pattern literal(std::string_view text, const std::string& what);

  // Every match in `text`, left to right, none overlapping; one may be empty, though not where
  // another ends. Replaces `matches`. REQUIRES: `text` is valid UTF-8.
  void find_all(std::string_view text, std::vector<Match>& matches) const;

 private:
  explicit Pattern(std::shared_ptr<const PatternProgram> program) : program_(std::move(program)) {}

  std::shared_ptr<const PatternProgram> program_;
};

}  // namespace poise
