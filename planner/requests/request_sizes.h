#pragma once
// How long the requests of a file are, read as fast as the file: for plans, which need no more. The
// first lines are read as a run reads them; of the others only what says how long they are is looked
// for, and a line that is not written plainly is read in full. The tokens of a prompt given as text
// are estimated from its bytes, as the first lines have them.

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "planner/requests/request_line.h"
#include "planner/requests/request_size.h"

namespace poise {

struct RequestSizes {
  std::vector<RequestSize> requests;
  std::int64_t refused = 0;   // lines that become errors, as far as that was looked at
  std::string first_refusal;  // of them the first one looked at: which line, and why
  bool estimated = false;     // some lengths were not counted
};

RequestSizes read_request_sizes(const std::filesystem::path& path, const RequestRules& rules);

}  // namespace poise
