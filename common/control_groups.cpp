#include "common/control_groups.h"

#include <algorithm>
#include <fstream>
#include <string>

namespace poise {
namespace {

namespace fs = std::filesystem;

// A version's names for limit, use, page cache and what of that is shared memory.
struct Names {
  const char* limit;
  const char* used;
  const char* cache;
  const char* shared;
};
constexpr Names kVersion2{"memory.max", "memory.current", "file", "shmem"};
constexpr Names kVersion1{"memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache",
                          "total_shmem"};

std::optional<std::int64_t> number_in(const fs::path& path) {
  std::ifstream file(path);
  std::int64_t value = 0;
  return file >> value ? std::optional(value) : std::nullopt;
}

std::int64_t reclaimable(const fs::path& group, const Names& names) {
  std::ifstream file(group / "memory.stat");
  std::int64_t cache = 0, shared = 0, value = 0;
  for (std::string key; file >> key >> value;) {
    if (key == names.cache) {
      cache = value;
    } else if (key == names.shared) {
      shared = value;
    }
  }
  return std::max<std::int64_t>(cache - shared, 0);
}

void take_the_least(std::optional<Bytes>& headroom, const fs::path& group, const Names& names) {
  const auto limit = number_in(group / names.limit);  // not where it says "max"
  const auto used = number_in(group / names.used);
  if (!limit || !used) {
    return;
  }
  const std::int64_t kept = std::max<std::int64_t>(*used - reclaimable(group, names), 0);
  const Bytes left{std::max<std::int64_t>(*limit - kept, 0)};
  headroom = std::min(headroom.value_or(left), left);
}

}  // namespace

std::optional<Bytes> control_group_headroom(const fs::path& groups, const fs::path& membership) {
  std::optional<Bytes> headroom;
  std::ifstream lines(membership);
  for (std::string line; std::getline(lines, line);) {  // number:controllers:/group
    const auto first = line.find(':');
    const auto second = line.find(':', first + 1);
    if (second == std::string::npos) {
      continue;
    }
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool version2 = controllers.empty();
    if (!version2 && controllers != "memory") {
      continue;
    }
    const fs::path root = version2 ? groups : groups / "memory";
    for (fs::path group = line.substr(second + 1);; group = group.parent_path()) {
      take_the_least(headroom, root / group.relative_path(), version2 ? kVersion2 : kVersion1);
      if (group == group.parent_path()) {
        break;
      }
    }
  }
  return headroom;
}

}  // namespace poise
