#pragma once
// Rewrites a text before it is cut into words, by the steps of a tokenizer.json. Immutable; any
// number of threads may use one at once.

#include <string>
#include <string_view>
#include <vector>

#include "planner/tokenizer/description.h"

namespace poise {

class Normalizer {
 public:
  explicit Normalizer(std::vector<NormalizerStep> steps) : steps_(std::move(steps)) {}

  bool changes_nothing() const { return steps_.empty(); }
  // Fails if the text grows beyond measure, as the replacements of a hostile file can make it.
  // REQUIRES: `text` is valid UTF-8.
  std::string normalize(std::string_view text) const;

 private:
  std::vector<NormalizerStep> steps_;
};

// `text` in Unicode's normal form C, by the tables of HuggingFace's `tokenizers`. O(n log n).
// REQUIRES: valid UTF-8.
std::string to_nfc(std::string_view text);

}  // namespace poise
