#pragma once
// Text to token ids and back, as HuggingFace's `tokenizers` does it for BPE, byte-level (GPT-2, OPT,
// Llama 3, Qwen) or of text with byte fallback (Llama 2, Mistral): from tokenizer.json, or from
// vocab.json + merges.txt as OPT has them (then as `transformers` uses the two). With both there, tokenizer.json decides, its post-processor about BOS too. What a file asks
// for and is not known here is refused by name when loading. Immutable after load(); any number of
// threads may use one at once. Text is UTF-8 everywhere.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/units.h"

namespace poise {

class TokenDecoder;

class Tokenizer {
 public:
  // Fails with one sentence for every directory it cannot make a tokenizer from. `model_rows` is
  // the number of rows of the model's embedding.
  static Tokenizer load(const std::filesystem::path& model_directory, std::int64_t model_rows);

  // Added and special tokens written in the text are recognised. `add_special_tokens` puts BOS (or
  // whatever the post-processor says) around the ids. Fails if the text is not UTF-8, or if a
  // hostile pattern would take too long on it. Ids can lie beyond the model's rows, where the
  // tokenizer has more tokens than the model: that is the caller's to refuse.
  std::vector<TokenId> encode(std::string_view text, bool add_special_tokens = true) const;

  // U+FFFD stands for what is not UTF-8. Ids without a token decode to nothing, as special ones do
  // if they are to be skipped.
  std::string decode(std::span<const TokenId> ids, bool skip_special_tokens = true) const;
  // One token alone, special or not.
  std::string token_text(TokenId id) const;
  // The token as the decoder takes it: its bytes, which may be a part of a character, or of a
  // vocabulary of text its content. Empty for an id without a token.
  std::string_view token_bytes(TokenId id) const;
  // Decodes token after token; borrows from this tokenizer or a copy of it.
  TokenDecoder decoder(bool continues = false) const;

  bool has(TokenId id) const;
  bool is_special(TokenId id) const;
  // As the configuration names them; nothing if it does not, or if the model has no row for it.
  std::optional<TokenId> bos() const;
  std::optional<TokenId> eos() const;
  // Whether encode() puts something before the text.
  bool adds_bos() const;
  // One past the largest id that has a token.
  std::int64_t size() const;

 private:
  struct Parts;
  explicit Tokenizer(std::shared_ptr<const Parts> parts) : parts_(std::move(parts)) {}

  std::shared_ptr<const Parts> parts_;  // copies of a Tokenizer share them
};

}  // namespace poise
