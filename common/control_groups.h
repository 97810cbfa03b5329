#pragma once
// What the control groups around this process still allow it to take: version 2, and version 1's
// memory controller. A pure function of the files it reads; any thread may call it.

#include <filesystem>
#include <optional>

#include "common/units.h"

namespace poise {

// The least of what this process's group and those above it leave free; nothing where no group has
// a limit. What files read before have left in the page cache is counted as used by the kernel, but
// goes as soon as memory is wanted: it is free here. Memory of /dev/shm is not.
std::optional<Bytes> control_group_headroom(
    const std::filesystem::path& groups = "/sys/fs/cgroup",
    const std::filesystem::path& membership = "/proc/self/cgroup");

}  // namespace poise
