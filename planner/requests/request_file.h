#pragma once
// The input file as a whole: every line that is not blank becomes a Request or a RequestError, in
// the file's order. Lines are parsed, checked and tokenised on several threads; the outcome does not
// depend on how many. Fails if the file itself cannot be used; a bad line never makes it fail.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "planner/requests/request_line.h"

namespace poise {

struct RequestFile {
  std::vector<Request> requests;  // a line's further choices stand behind its first
  std::vector<RequestError> errors;
  std::string digest;  // SHA-256 of the file's bytes, lower-case hex

  std::size_t answerable() const;  // lines
  std::size_t lines() const { return answerable() + errors.size(); }
  // The input lines that want a result, in order.
  std::vector<RequestId> line_numbers() const;
};

// `chat_prompts`: what was rendered of the file's chat lines (planner/requests/chat_prompts.h).
// `threads` 0: as many as the machine has.
RequestFile read_requests(const std::filesystem::path& path, const RequestRules& rules,
                          int threads = 0,
                          const std::optional<std::filesystem::path>& chat_prompts = {});

}  // namespace poise
