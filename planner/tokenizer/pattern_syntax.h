#pragma once
// The tree that an expression is read into. Private to Pattern.

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "planner/tokenizer/char_set.h"

namespace poise {

enum class Greed { greedy, lazy, possessive };

inline constexpr std::uint32_t kUnlimited = UINT32_MAX;

struct PatternNode {
  enum class Kind {
    set,         // one character of `set`
    sequence,    // the children, one after the other; none matches the empty text
    choice,      // the first child that leads to a match
    repeat,      // the only child, `least` to `most` times
    atomic,      // the only child, never tried again once it has matched
    look_ahead,  // the only child would match here
    no_look_ahead,
  };
  Kind kind = Kind::sequence;
  std::vector<PatternNode> children;
  std::unique_ptr<CharSet> set;
  std::uint32_t least = 0, most = 0;
  Greed greed = Greed::greedy;
};

PatternNode parse_pattern(std::string_view expression, const std::string& what);

}  // namespace poise
