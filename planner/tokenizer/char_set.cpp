#include "planner/tokenizer/char_set.h"

#include <algorithm>
#include <utility>

namespace poise {

CharSet CharSet::of(char32_t c) {
  Term term;
  term.ranges.push_back({c, c});
  return CharSet({std::move(term)}, false);
}

CharSet::CharSet(std::vector<Term> terms, bool negated)
    : terms_(std::move(terms)), negated_(negated), categories_(category_table()) {
  for (char32_t c = 0; c < ascii_.size(); ++c) {
    ascii_[c] = beyond_ascii(c);
  }
}

bool CharSet::beyond_ascii(char32_t c) const {
  const CategoryMask category = mask_of(categories_[c]);
  for (const Term& term : terms_) {
    const bool inside =
        (term.categories & category) != 0 ||
        std::any_of(term.ranges.begin(), term.ranges.end(), [c](const CodePointRange& range) {
          return range.first <= c && c <= range.last;
        });
    if (inside != term.negated) {
      return !negated_;
    }
  }
  return negated_;
}

}  // namespace poise
