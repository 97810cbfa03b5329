#pragma once
// The lengths of a file's requests, read at the speed of the file: plans need no more. The first lines
// are read as a run reads them. In the others only the fields that give the length are searched, and a
// line in an unusual form is read in full. The tokens of a prompt given as text are estimated from its
// bytes, by the ratio in the first lines.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "planner/requests/request_line.h"
#include "planner/requests/request_size.h"

namespace poise {

struct RequestSizes {
  std::vector<RequestSize> requests;
  std::int64_t refused = 0;   // lines that become errors, among those read in full
  std::string first_refusal;  // the first of them: which line, and why
  bool estimated = false;     // some lengths were not counted
};

// `chat_prompts` as for read_requests; chat lines are read in full.
RequestSizes read_request_sizes(const std::filesystem::path& path, const RequestRules& rules,
                                const std::optional<std::filesystem::path>& chat_prompts = {});

}  // namespace poise
