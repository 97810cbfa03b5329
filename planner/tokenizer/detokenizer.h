#pragma once
// Text out of token ids as they are generated, one at a time: never a part of a character, and
// never one that a later token could still change. All texts together are Tokenizer::decode of all
// ids. One for each request; one thread at a time. The tokenizer's parts are shared, not borrowed.

#include <string>

#include "planner/tokenizer/tokenizer.h"

namespace poise {

class Detokenizer {
 public:
  explicit Detokenizer(Tokenizer tokenizer, bool skip_special_tokens = true)
      : tokenizer_(std::move(tokenizer)), skip_special_tokens_(skip_special_tokens) {}

  // The text that became certain with `id`; often empty within characters of several bytes.
  std::string push(TokenId id);
  // What was held back: an incomplete character shows as U+FFFD. Afterwards it begins anew.
  std::string finish();

 private:
  Tokenizer tokenizer_;
  bool skip_special_tokens_;
  std::string held_back_;  // the first bytes of a character, at most three
};

}  // namespace poise
