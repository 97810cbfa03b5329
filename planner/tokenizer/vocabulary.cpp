#include "planner/tokenizer/vocabulary.h"

#include <algorithm>

#include "common/files/json_file.h"
#include "common/trouble.h"

namespace poise {
namespace {

// Room for ids that were given up, not for one token in a thousand million rows.
constexpr std::int64_t kSpareIds = 1 << 20;

}  // namespace

Vocabulary::Vocabulary(const nlohmann::json& tokens, std::string what) {
  if (!tokens.is_object()) {
    fail("{} must be an object of tokens and their ids, not {}", what, described(tokens));
  }
  if (tokens.empty()) {
    fail("{} is empty; a tokenizer needs tokens", what);
  }
  tokens_.reserve(tokens.size());
  ids_.reserve(tokens.size());
  for (const auto& [token, value] : tokens.items()) {
    const std::optional<std::int64_t> id = as_integer(value);
    if (!id || *id < 0 || *id > kLargestTokenId) {
      fail("{}: the id of \"{}\" must be an integer from 0 to {}, not {}", what, shown(token),
           kLargestTokenId, described(value));
    }
    if (!ids_.insert(static_cast<TokenId>(*id)).second) {
      fail("{}: two tokens have the id {}, one of them \"{}\"; ids must differ", what, *id,
           shown(token));
    }
    tokens_.emplace(token, static_cast<TokenId>(*id));
  }
  const TokenId largest = *std::max_element(ids_.begin(), ids_.end());
  if (largest > 4 * count() + kSpareIds) {
    fail("{}: an id of {} among only {} tokens; ids must lie closer together", what, largest,
         count());
  }
}

std::optional<TokenId> Vocabulary::find(const std::string& token) const {
  const auto place = tokens_.find(token);
  if (place == tokens_.end()) {
    return std::nullopt;
  }
  return place->second;
}

BpeDescription::Merge Vocabulary::merge(const std::string& left, const std::string& right,
                                        std::size_t rank, const std::string& what) const {
  auto known = [&](const std::string& token) {
    const std::optional<TokenId> id = find(token);
    if (!id) {
      fail(
          "{}: merge {} (\"{}\" and \"{}\") needs the token \"{}\", which is not in the vocabulary",
          what, rank, shown(left), shown(right), shown(token));
    }
    return *id;
  };
  return {known(left), known(right), known(left + right)};
}

BpeDescription::Merge Vocabulary::merge(std::string_view line, std::size_t rank,
                                        const std::string& what) const {
  const std::size_t space = line.find(' ');
  if (space == std::string_view::npos || line.find(' ', space + 1) != std::string_view::npos) {
    fail("{}: merge {} must be two tokens with one space between, not \"{}\"", what, rank,
         shown(line));
  }
  return merge(std::string(line.substr(0, space)), std::string(line.substr(space + 1)), rank, what);
}

std::vector<std::pair<std::string, TokenId>> Vocabulary::sorted() const {
  std::vector<std::pair<std::string, TokenId>> all(tokens_.begin(), tokens_.end());
  std::sort(all.begin(), all.end(),
            [](const auto& a, const auto& b) { return a.second < b.second; });
  return all;
}

}  // namespace poise
