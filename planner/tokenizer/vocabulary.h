#pragma once
// The tokens of a BPE model and their ids while a tokenizer's files are read. Holds the rules that
// every form of vocabulary must keep: each token once, each id once, ids that fit and lie together.

#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "common/files/json.h"
#include "planner/tokenizer/description.h"

namespace poise {

inline constexpr std::int64_t kLargestTokenId = INT32_MAX - 1;

class Vocabulary {
 public:
  // From an object of token → id. `what` begins every sentence.
  Vocabulary(const nlohmann::json& tokens, std::string what);

  std::optional<TokenId> find(const std::string& token) const;
  bool has(TokenId id) const { return ids_.contains(id); }
  std::int64_t count() const { return static_cast<std::int64_t>(tokens_.size()); }
  // Fails if one of the three tokens is not in the vocabulary. `rank` counts from 1.
  BpeDescription::Merge merge(const std::string& left, const std::string& right, std::size_t rank,
                              const std::string& what) const;
  // "left right", as merges are written in files.
  BpeDescription::Merge merge(std::string_view line, std::size_t rank,
                              const std::string& what) const;
  // Every token, by id.
  std::vector<std::pair<std::string, TokenId>> sorted() const;

 private:
  std::unordered_map<std::string, TokenId> tokens_;
  std::unordered_set<TokenId> ids_;
};

}  // namespace poise
