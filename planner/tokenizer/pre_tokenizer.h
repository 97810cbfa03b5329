#pragma once
// Cuts a text into the words that byte-pair encoding then works on one by one, by the steps of a
// tokenizer.json: each step cuts the parts of the one before further. Immutable; any number of
// threads may cut at once.

#include <functional>
#include <string_view>
#include <vector>

#include "planner/tokenizer/description.h"

namespace poise {

// The pattern that GPT-2 cuts words by, and ByteLevel with use_regex.
const Pattern& gpt2_pattern();

class PreTokenizer {
 public:
  using WordSink = std::function<void(std::string_view word)>;

  explicit PreTokenizer(std::vector<PreTokenizerStep> steps) : steps_(std::move(steps)) {}

  // Calls `sink` with each word in order, as bytes; a word lives until `sink` returns. `first`:
  // nothing stands before the text, no added token either. REQUIRES: `text` is valid UTF-8.
  void cut(std::string_view text, bool first, const WordSink& sink) const {
    apply(0, text, {sink, first ? text.data() : nullptr});
  }

 private:
  struct Cutting {
    const WordSink& sink;
    const char* first;  // where the very first word begins; nullptr: before this text
  };

  void apply(std::size_t step, std::string_view part, const Cutting& cutting) const;
  void apply_split(const SplitStep& split, std::size_t step, std::string_view part,
                   const Cutting& cutting) const;
  void apply_digits(const DigitsStep& digits, std::size_t step, std::string_view part,
                    const Cutting& cutting) const;
  void apply_metaspace(const MetaspaceStep& metaspace, std::size_t step, std::string_view part,
                       const Cutting& cutting) const;
  static void apply_byte_level(const ByteLevelStep& byte_level, std::string_view part,
                               const WordSink& sink);

  std::vector<PreTokenizerStep> steps_;
};

}  // namespace poise
