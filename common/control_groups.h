#pragma once
// How much memory the control groups around this process still allow: version 2, and version 1's
// memory controller. A pure function of the files it reads; any thread may call it.

#include <filesystem>
#include <optional>

#include "common/units.h"

namespace poise {

// The smallest amount that this process's group and the groups above it leave free; nothing if no
// group has a limit. The kernel counts the page cache of files as used, but frees it on demand, so
// it counts as free here. Memory of /dev/shm does not.
std::optional<Bytes> control_group_headroom(
    const std::filesystem::path& groups = "/sys/fs/cgroup",
    const std::filesystem::path& membership = "/proc/self/cgroup");

}  // namespace poise
