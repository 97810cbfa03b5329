#pragma once
// A model directory for one test: the files it is given, gone when it goes.

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <optional>
#include <string>

#include "common/files/json.h"
#include "common/trouble.h"
#include "planner/tokenizer/tokenizer.h"

namespace poise {

class TokenizerDirectory {
 public:
  TokenizerDirectory() {
    std::string name = (std::filesystem::temp_directory_path() / "tokenizer-XXXXXX").string();
    check(::mkdtemp(name.data()) != nullptr, "a directory for a test");
    path_ = name;
  }
  TokenizerDirectory(const TokenizerDirectory&) = delete;
  ~TokenizerDirectory() { std::filesystem::remove_all(path_); }

  TokenizerDirectory& write(const std::string& name, const std::string& content) {
    std::ofstream(path_ / name, std::ios::binary) << content;
    return *this;
  }
  TokenizerDirectory& write_json(const std::string& name, const nlohmann::json& content) {
    return write(name, content.dump());
  }
  const std::filesystem::path& path() const { return path_; }
  Tokenizer load(std::int64_t rows = 100000) const { return Tokenizer::load(path_, rows); }

  // The sentence that loading fails with, its path left out; nothing if it does not fail.
  std::optional<std::string> failure(std::int64_t rows = 100000) const {
    try {
      load(rows);
    } catch (const Failure& failure) {
      std::string sentence = failure.what();
      for (std::size_t at = 0; (at = sentence.find(path_.string())) != std::string::npos;) {
        sentence.replace(at, path_.string().size(), "DIR");
      }
      return sentence;
    }
    return std::nullopt;
  }

 private:
  std::filesystem::path path_;
};

// A small tokenizer.json that loads: single characters, "ab", "abc", and a merge for each of the
// two.
inline nlohmann::json small_tokenizer() {
  nlohmann::json vocabulary;
  int id = 0;
  for (const char* token : {"a", "b", "c", "d", "1", "2", "Ġ", "Ċ", "-", "Ã", "©"}) {
    vocabulary[token] = id++;
  }
  vocabulary["ab"] = id++;
  vocabulary["abc"] = id++;
  const nlohmann::json byte_level = {{"type", "ByteLevel"},
                                     {"add_prefix_space", false},
                                     {"trim_offsets", true},
                                     {"use_regex", true}};
  return {{"version", "1.0"},
          {"truncation", nullptr},
          {"padding", nullptr},
          {"added_tokens", nlohmann::json::array()},
          {"normalizer", nullptr},
          {"pre_tokenizer", byte_level},
          {"post_processor", nullptr},
          {"decoder", byte_level},
          {"model",
           {{"type", "BPE"},
            {"vocab", vocabulary},
            {"merges", nlohmann::json::array({"a b", "ab c"})}}}};
}

inline nlohmann::json added_token(int id, const std::string& content) {
  return {{"id", id},        {"content", content},  {"single_word", false}, {"lstrip", false},
          {"rstrip", false}, {"normalized", false}, {"special", true}};
}

}  // namespace poise
