#include "planner/tokenizer/detokenizer.h"

#include <utility>

namespace poise {

Detokenizer::Detokenizer(Tokenizer tokenizer, bool skip_special_tokens, bool continues)
    : tokenizer_(std::move(tokenizer)),
      skip_special_tokens_(skip_special_tokens),
      continues_(continues),
      decoder_(tokenizer_.decoder(continues)) {}

std::string Detokenizer::push(TokenId id) {
  std::string text;
  if (tokenizer_.has(id) && (!skip_special_tokens_ || !tokenizer_.is_special(id))) {
    decoder_.push(tokenizer_.token_bytes(id), text);
  }
  return text;
}

std::string Detokenizer::finish() {
  std::string text;
  decoder_.finish(text);
  decoder_ = tokenizer_.decoder(continues_);
  return text;
}

}  // namespace poise
