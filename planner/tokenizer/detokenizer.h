#pragma once
// Text out of token ids as they are generated, one at a time: never a part of a character, and
// never one that a later token could still change. All texts together are Tokenizer::decode of all
// ids. One for each request; one thread at a time. The tokenizer's parts are shared, not borrowed.

#include <string>

#include "planner/tokenizer/decoder.h"
#include "planner/tokenizer/tokenizer.h"

namespace poise {

class Detokenizer {
 public:
  // `continues`: the ids go on with a text, whose beginning is not theirs (Llama-2 takes a space off
  // the beginning).
  explicit Detokenizer(Tokenizer tokenizer, bool skip_special_tokens = true,
                       bool continues = false);

  // The text that became certain with `id`; often empty within characters of several bytes.
  std::string push(TokenId id);
  // What was held back: an incomplete character shows as U+FFFD. Afterwards it begins anew.
  std::string finish();
  // What was held back, if it is whole characters: the text if no id followed, though the next one
  // can change it. "<0x0A>" is a newline, unless a byte follows that makes both of them U+FFFD.
  std::string held_back() const { return decoder_.held_back(); }

 private:
  Tokenizer tokenizer_;
  bool skip_special_tokens_, continues_;
  TokenDecoder decoder_;
};

}  // namespace poise
