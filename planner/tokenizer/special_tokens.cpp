#include "planner/tokenizer/special_tokens.h"

#include <algorithm>
#include <charconv>
#include <utility>

#include "common/files/json_file.h"
#include "common/trouble.h"

namespace poise {
namespace {

// Bounds what looking for added tokens can cost at one place of a text.
constexpr std::size_t kLongestContent = 1024;

constexpr const char* kRoles[] = {"bos_token", "eos_token", "unk_token", "sep_token",
                                  "pad_token", "cls_token", "mask_token"};
constexpr const char* kRolesWithDefault[] = {"bos_token", "eos_token", "unk_token"};

AddedToken read_token(const nlohmann::json& value, const std::string& what) {
  const JsonObject object(value, what);
  AddedToken token;
  const std::optional<std::string> content = object.string("content");
  if (!content) {
    object.refuse("content", "is missing; an added token needs it");
  }
  token.content = *content;
  token.single_word = object.boolean("single_word").value_or(false);
  token.lstrip = object.boolean("lstrip").value_or(false);
  token.rstrip = object.boolean("rstrip").value_or(false);
  token.special = object.boolean("special").value_or(false);
  token.normalized = object.boolean("normalized").value_or(!token.special);
  return token;
}

// A name's value: "text", or an object with "content" and flags.
AddedToken read_named(const nlohmann::json& value, const std::string& what) {
  AddedToken token;
  if (value.is_string()) {
    token.content = value.get<std::string>();
  } else if (value.is_object()) {
    token = read_token(value, what);
  } else {
    fail("{} must be a token's text or an object with \"content\", not {}", what, described(value));
  }
  token.special = true;
  return token;
}

nlohmann::json read_if_there(const std::filesystem::path& path) {
  if (!std::filesystem::exists(std::filesystem::symlink_status(path))) {
    return nlohmann::json::object();
  }
  nlohmann::json json = read_json_file(path);
  JsonObject(json, shown(path.string(), 300));  // it must be an object
  return json;
}

std::string in(const std::string& what, std::string_view name) {
  return fmt::format("{}: \"{}\"", what, name);
}

}  // namespace

void AddedTokenList::add(const nlohmann::json& token, std::optional<std::int64_t> id,
                         const std::string& what) {
  append(read_token(token, what), id, what);
}

void AddedTokenList::add_special(AddedToken token, const std::string& what) {
  if (const auto place = place_.find(token.content); place != place_.end()) {
    tokens_[place->second].special = true;
    return;
  }
  append(std::move(token), std::nullopt, what);
}

std::optional<TokenId> AddedTokenList::find(const std::string& content) const {
  if (const auto place = place_.find(content); place != place_.end()) {
    return tokens_[place->second].id;
  }
  return vocabulary_.find(content);
}

std::int64_t AddedTokenList::next_id() const { return std::max(largest_ + 1, vocabulary_.count()); }

void AddedTokenList::append(AddedToken token, std::optional<std::int64_t> stated,
                            const std::string& what) {
  if (token.content.empty()) {
    return;  // matches nothing
  }
  if (token.content.size() > kLongestContent) {
    fail("{}: an added token of {} bytes; at most {} are taken", what, token.content.size(),
         kLongestContent);
  }
  if (has(token.content)) {
    fail("{}: the token \"{}\" is added twice", what, shown(token.content));
  }
  const std::optional<TokenId> known = vocabulary_.find(token.content);
  const std::int64_t id = known ? *known : next_id();
  if (stated && *stated != id) {
    fail("{}: \"{}\" is given the id {}, but {} {}; added ids must follow the vocabulary's", what,
         shown(token.content), *stated, known ? "in the vocabulary it is" : "the next free one is",
         id);
  }
  if (!known && (id > kLargestTokenId || vocabulary_.has(static_cast<TokenId>(id)))) {
    fail("{}: two tokens have the id {}, one of them \"{}\"; ids must differ", what, id,
         shown(token.content));
  }
  token.id = static_cast<TokenId>(id);
  largest_ = std::max(largest_, id);
  place_.emplace(token.content, tokens_.size());
  tokens_.push_back(std::move(token));
}

TokenizerConfiguration::TokenizerConfiguration(const std::filesystem::path& directory)
    : what_(shown((directory / "tokenizer_config.json").string(), 300)),
      config_(read_if_there(directory / "tokenizer_config.json")),
      special_map_(read_if_there(directory / "special_tokens_map.json")),
      added_(read_if_there(directory / "added_tokens.json")),
      special_map_what_(shown((directory / "special_tokens_map.json").string(), 300)),
      added_what_(shown((directory / "added_tokens.json").string(), 300)) {
  if (flag("split_special_tokens")) {
    fail("{} is not supported: special tokens are recognised in text; remove it",
         in(what_, "split_special_tokens"));
  }
  // A configuration with this list is complete; the two older files then say nothing new.
  if (config_.contains("added_tokens_decoder")) {
    special_map_ = nlohmann::json::object();
    added_ = nlohmann::json::object();
  }
}

bool TokenizerConfiguration::flag(std::string_view name) const {
  return JsonObject(config_, what_).boolean(name).value_or(false);
}

std::optional<std::string> TokenizerConfiguration::tokenizer_class() const {
  return JsonObject(config_, what_).string("tokenizer_class");
}

std::optional<std::string> TokenizerConfiguration::name(const std::string& role,
                                                        const std::string& default_name) const {
  for (const auto& [file, what] :
       {std::pair(&special_map_, &special_map_what_), std::pair(&config_, &what_)}) {
    if (const auto value = file->find(role); value != file->end()) {
      if (value->is_null()) {
        return std::nullopt;
      }
      return read_named(*value, in(*what, role)).content;
    }
  }
  if (default_name.empty()) {
    return std::nullopt;
  }
  return default_name;
}

void TokenizerConfiguration::apply(AddedTokenList& tokens, const std::string& default_name) const {
  // By id, whatever the order in the file: later ones follow earlier ones.
  std::map<std::int64_t, std::pair<nlohmann::json, std::string>> listed;
  if (const std::optional<JsonObject> list =
          JsonObject(config_, what_).object("added_tokens_decoder")) {
    for (const auto& [key, value] : list->json().items()) {
      std::int64_t id = -1;
      const auto end = std::from_chars(key.data(), key.data() + key.size(), id);
      if (end.ec != std::errc() || end.ptr != key.data() + key.size() || id < 0) {
        list->refuse(key, "is no token id");
      }
      listed.emplace(id, std::pair(value, list->what()));
    }
  }
  for (const auto& [content, value] : added_.items()) {
    const std::optional<std::int64_t> id = as_integer(value);
    if (!id || *id < 0) {
      JsonObject(added_, added_what_).refuse(content, "must be a token id");
    }
    const nlohmann::json token = {{"content", content}};
    if (!listed.emplace(*id, std::pair(token, added_what_)).second) {
      fail("{}: two tokens have the id {}; ids must differ", added_what_, *id);
    }
  }
  for (const auto& [id, token] : listed) {
    const auto content = token.first.find("content");
    const bool there = content != token.first.end() && content->is_string() &&
                       tokens.has(content->get<std::string>());
    if (!there) {
      tokens.add(token.first, id, token.second);
    }
  }

  nlohmann::json named = config_;
  named.update(special_map_);
  for (const char* role : kRolesWithDefault) {
    if (!named.contains(role) && !default_name.empty()) {
      named[role] = default_name;
    }
  }
  const std::string& what = special_map_.empty() ? what_ : special_map_what_;
  auto add_named = [&](const nlohmann::json& value, std::string_view role) {
    if (!value.is_null()) {
      tokens.add_special(read_named(value, in(what, role)), in(what, role));
    }
  };
  for (const char* role : kRoles) {
    if (named.contains(role)) {
      add_named(named.at(role), role);
      named.erase(role);
    }
  }
  for (const auto& [role, value] : named.items()) {
    const bool list = role == "extra_special_tokens" || role == "additional_special_tokens";
    if (list && (value.is_array() || value.is_object())) {
      for (const nlohmann::json& token : value) {
        add_named(token, role);
      }
    } else if (role.ends_with("_token") && value.is_string()) {
      add_named(value, role);  // a name that only this model has
    }
  }
}

}  // namespace poise
