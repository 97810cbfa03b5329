#include "planner/tokenizer/detokenizer.h"

#include "planner/tokenizer/unicode.h"

namespace poise {

std::string Detokenizer::push(TokenId id) {
  std::string text;
  if (!skip_special_tokens_ || !tokenizer_.is_special(id)) {
    held_back_ += tokenizer_.token_bytes(id);
    held_back_.erase(0, append_lossy(text, held_back_, true));
  }
  return text;
}

std::string Detokenizer::finish() {
  std::string text;
  append_lossy(text, held_back_, false);
  held_back_.clear();
  return text;
}

}  // namespace poise
