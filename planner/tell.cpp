#include "planner/tell.h"

#include <fmt/core.h>
#include <spdlog/spdlog.h>

#include <cstdio>

namespace poise {

void tell(const std::string& line) {
  fmt::print("{}\n", line);
  std::fflush(stdout);
  spdlog::info("{}", line);
}

}  // namespace poise
