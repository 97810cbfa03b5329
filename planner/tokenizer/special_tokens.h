#pragma once
// Added and special tokens while a tokenizer's files are read: their ids, and what
// tokenizer_config.json, special_tokens_map.json and added_tokens.json say of them, as
// `transformers` puts it together.

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "common/files/json.h"
#include "planner/tokenizer/vocabulary.h"

namespace poise {

// The list of added tokens as it grows. A token of the vocabulary keeps its id; another gets the
// next one, as in HuggingFace; a file that states a different id is refused.
class AddedTokenList {
 public:
  explicit AddedTokenList(const Vocabulary& vocabulary) : vocabulary_(vocabulary) {}

  // From an object with "content" and flags; `id` as stated there or beside it, if anywhere.
  void add(const nlohmann::json& token, std::optional<std::int64_t> id, const std::string& what);
  // A special token by name: marks the one that is there, or adds it.
  void add_special(AddedToken token, const std::string& what);
  bool has(const std::string& content) const { return place_.contains(content); }
  // Among added tokens, else in the vocabulary.
  std::optional<TokenId> find(const std::string& content) const;
  std::vector<AddedToken> take() { return std::move(tokens_); }

 private:
  void append(AddedToken token, std::optional<std::int64_t> stated, const std::string& what);
  std::int64_t next_id() const;

  const Vocabulary& vocabulary_;
  std::vector<AddedToken> tokens_;
  std::map<std::string, std::size_t> place_;  // in tokens_
  std::int64_t largest_ = -1;
};

// What the configuration files beside a vocabulary say.
class TokenizerConfiguration {
 public:
  explicit TokenizerConfiguration(const std::filesystem::path& directory);

  // Adds what the files name and `tokens` does not have yet. `default_name` is the content of
  // bos_token, eos_token and unk_token where nothing names them; empty: there is no default.
  void apply(AddedTokenList& tokens, const std::string& default_name) const;
  // The content of "bos_token", "eos_token" …
  std::optional<std::string> name(const std::string& role, const std::string& default_name) const;
  bool flag(std::string_view name) const;  // false where absent
  std::optional<std::string> tokenizer_class() const;

 private:
  std::string what_;
  nlohmann::json config_, special_map_, added_;
  std::string special_map_what_, added_what_;
};

}  // namespace poise
