#pragma once
// What the tests of requests and answers share: the tokenizer of bytes, what a refusal says, and one
// input line around a body.

#include <fmt/core.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>
#include <string_view>

#include "common/files/json.h"
#include "common/trouble.h"
#include "planner/requests/request_line.h"
#include "tests/planner/tokenizer/byte_tokenizer.h"

namespace poise::testing_support {

inline std::string content_of(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// The sentence and code of a Failure; code done where nothing failed.
struct Complaint {
  std::string sentence;
  Exit code = Exit::done;
};
inline Complaint complaint(const std::function<void()>& act) {
  try {
    act();
  } catch (const Failure& failure) {
    return {failure.what(), failure.code()};
  }
  return {};
}

inline std::string chat_line_with(std::string_view body, std::string_view custom_id = "a") {
  return fmt::format(
      R"({{"custom_id":"{}","method":"POST","url":"/v1/chat/completions","body":{}}})", custom_id,
      body);
}

inline std::string line_with(std::string_view body, std::string_view custom_id = "a") {
  return fmt::format(R"({{"custom_id":"{}","method":"POST","url":"/v1/completions","body":{}}})",
                     custom_id, body);
}

}  // namespace poise::testing_support
