#include "planner/links/announce.h"

#include <fmt/core.h>
#include <spdlog/spdlog.h>

#include <cstdio>

namespace poise {

void announce(const std::string& line) {
  fmt::print("{}\n", line);
  std::fflush(stdout);
  spdlog::info("{}", line);
}

}  // namespace poise
