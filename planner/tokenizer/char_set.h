#pragma once
// A set of characters, as a pattern writes it: \p{L}, [^\r\n], a single letter. Immutable.

#include <array>
#include <vector>

#include "planner/tokenizer/unicode.h"

namespace poise {

// Some characters: the union of its terms, or everything else.
class CharSet {
 public:
  struct Term {
    CategoryMask categories = 0;
    std::vector<CodePointRange> ranges;
    bool negated = false;
  };

  static CharSet of(char32_t c);
  CharSet(std::vector<Term> terms, bool negated);

  bool contains(char32_t c) const { return c < ascii_.size() ? ascii_[c] : beyond_ascii(c); }
  bool contains_ascii(unsigned char byte) const { return ascii_[byte]; }

 private:
  bool beyond_ascii(char32_t c) const;

  std::vector<Term> terms_;
  bool negated_;
  const Category* categories_;
  std::array<bool, 128> ascii_;
};

}  // namespace poise
