#pragma once
// Turns tokens into text one by one, as the decoder of a tokenizer.json does with all of them at
// once. Text is given out as soon as no later token can change it: a run of byte tokens waits for its
// end, an incomplete character for its last byte. One thread at a time; the steps are borrowed.

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "planner/tokenizer/description.h"

namespace poise {

class TokenDecoder {
 public:
  // `continues`: other text stands before the tokens, so nothing is taken off their beginning.
  explicit TokenDecoder(std::span<const DecoderStep> steps, bool continues = false);

  // Appends to `text` what became certain with the next token.
  void push(std::string_view token, std::string& text) { push(0, token, text); }
  // Appends what was held back, as if no token followed. Only destruction may come next.
  void finish(std::string& text);
  // What finish() would append, if no U+FFFD stands in it for bytes that are still to come.
  std::string held_back() const;

 private:
  struct State {
    std::string bytes;       // held back
    bool fused = false;      // what comes in is one text
    std::size_t strips = 0;  // how many more characters may be taken off the fused text
    bool first = true;       // no token came yet
  };

  void push(std::size_t step, std::string_view token, std::string& text);
  void flush_bytes(std::size_t step, std::string& text);

  std::span<const DecoderStep> steps_;
  std::vector<State> states_;  // beside each step
  bool continues_;
};

}  // namespace poise
