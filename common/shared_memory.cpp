#include "common/shared_memory.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <boost/interprocess/mapped_region.hpp>
#include <boost/interprocess/shared_memory_object.hpp>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>

#include "common/trouble.h"

namespace poise {
namespace {

namespace bip = boost::interprocess;

constexpr const char* kShmDirectory = "/dev/shm";

void hold(int descriptor, const std::string& name) {
  if (flock(descriptor, LOCK_SH | LOCK_NB) != 0) {
    fail("shared memory {} is being cleaned up by another process; start again", name);
  }
}

std::optional<std::int64_t> number_in(const std::string& path) {
  std::ifstream file(path);
  std::int64_t value = 0;
  return file >> value ? std::optional(value) : std::nullopt;
}

std::optional<std::int64_t> memory_available() {
  std::ifstream file("/proc/meminfo");
  std::string key, unit;
  std::int64_t kib = 0;
  while (file >> key >> kib) {
    std::getline(file, unit);
    if (key == "MemAvailable:") {
      return kib * 1024;
    }
  }
  return std::nullopt;
}

// What the control groups above this process still allow (version 2, else version 1).
std::int64_t cgroup_headroom() {
  std::int64_t headroom = std::numeric_limits<std::int64_t>::max();
  std::ifstream membership("/proc/self/cgroup");
  for (std::string line; std::getline(membership, line);) {
    if (!line.starts_with("0::")) {
      continue;
    }
    for (std::filesystem::path group = line.substr(3);; group = group.parent_path()) {
      const std::string directory = "/sys/fs/cgroup" + group.string();
      const auto limit = number_in(directory + "/memory.max");
      const auto used = number_in(directory + "/memory.current");
      if (limit && used) {
        headroom = std::min(headroom, *limit - *used);
      }
      if (group == group.parent_path()) {
        break;
      }
    }
  }
  const auto limit = number_in("/sys/fs/cgroup/memory/memory.limit_in_bytes");
  const auto used = number_in("/sys/fs/cgroup/memory/memory.usage_in_bytes");
  if (limit && used) {
    headroom = std::min(headroom, *limit - *used);
  }
  return headroom;
}

std::string own_prefix() { return fmt::format("poise-{}-", geteuid()); }

// The run a segment's name belongs to: the name without its last part.
std::string group_of(const std::string& name) {
  return name.substr(0, name.find('-', own_prefix().size()));
}

// Whether nobody is attached to a segment, nor just about to be: its creator locks before it gives
// the segment a size.
bool abandoned(const std::string& name) {
  const int descriptor = shm_open(("/" + name).c_str(), O_RDONLY, 0);
  if (descriptor < 0) {
    return errno == EACCES ? false : errno == ENOENT;
  }
  struct stat status {};
  const bool free = flock(descriptor, LOCK_EX | LOCK_NB) == 0 && fstat(descriptor, &status) == 0 &&
                    status.st_uid == geteuid() &&
                    (status.st_size > 0 || status.st_mtime + 2 < std::time(nullptr));
  ::close(descriptor);
  return free;
}

}  // namespace

struct Segment::Mapping {
  bip::shared_memory_object object;
  bip::mapped_region region;

  int descriptor() const { return object.get_mapping_handle().handle; }
};

Segment::Segment(std::string name, std::unique_ptr<Mapping> mapping)
    : name_(std::move(name)), mapping_(std::move(mapping)) {}
Segment::Segment(Segment&&) noexcept = default;
Segment& Segment::operator=(Segment&&) noexcept = default;
Segment::~Segment() = default;

std::byte* Segment::data() const { return static_cast<std::byte*>(mapping_->region.get_address()); }
Bytes Segment::size() const { return {static_cast<std::int64_t>(mapping_->region.get_size())}; }

Segment Segment::create(const std::string& name, Bytes size) {
  check(size.n > 0, "a segment has a size");
  auto mapping = std::make_unique<Mapping>();
  try {
    mapping->object = bip::shared_memory_object(bip::create_only, name.c_str(), bip::read_write,
                                                bip::permissions(0600));
    hold(mapping->descriptor(), name);
    // ftruncate and posix_fallocate in one: pages that cannot be had are an error now.
    const int error = posix_fallocate(mapping->descriptor(), 0, size.n);
    if (error != 0) {
      bip::shared_memory_object::remove(name.c_str());
      fail(
          "{} bytes of shared memory for {} cannot be reserved ({}; {} bytes are available): use a "
          "smaller "
          "--host-memory or enlarge /dev/shm",
          size.n, name, std::strerror(error), available_host_memory().n);
    }
    mapping->region = bip::mapped_region(mapping->object, bip::read_write);
  } catch (const bip::interprocess_exception& problem) {
    fail("shared memory {} cannot be created: {}", name, problem.what());
  }
  return {name, std::move(mapping)};
}

Segment Segment::attach(const std::string& name, Access access) {
  auto mapping = std::make_unique<Mapping>();
  try {
    const auto mode = access == Access::read_only ? bip::read_only : bip::read_write;
    mapping->object = bip::shared_memory_object(bip::open_only, name.c_str(), mode);
    struct stat status {};
    check(fstat(mapping->descriptor(), &status) == 0, "an open segment has a status");
    if (status.st_uid != geteuid() || (status.st_mode & 077) != 0) {
      fail("shared memory {} belongs to user {} with mode {:o}, not to this user alone: remove it",
           name, status.st_uid, status.st_mode & 0777u);
    }
    hold(mapping->descriptor(), name);
    if (status.st_size == 0) {
      fail("shared memory {} is empty: its creator ended before it was ready", name);
    }
    mapping->region = bip::mapped_region(mapping->object, mode);
  } catch (const bip::interprocess_exception& problem) {
    fail("shared memory {} cannot be attached: {}", name, problem.what());
  }
  return {name, std::move(mapping)};
}

void Segment::seal() {
  check(fchmod(mapping_->descriptor(), 0400) == 0, "the owner of a segment may change its mode");
}

std::string segment_name(std::string_view run_id, std::string_view what) {
  return fmt::format("{}{}-{}", own_prefix(), run_id, what);
}

void unlink_segment(const std::string& name) { bip::shared_memory_object::remove(name.c_str()); }

std::vector<std::string> reap_segments() {
  std::vector<std::string> names;
  std::error_code ignored;
  for (const auto& file : std::filesystem::directory_iterator(kShmDirectory, ignored)) {
    if (file.path().filename().string().starts_with(own_prefix())) {
      names.push_back(file.path().filename().string());
    }
  }
  std::ranges::sort(names);
  std::vector<std::string> reaped;
  for (const std::string& name : names) {
    const bool all_abandoned = std::ranges::all_of(names, [&](const std::string& other) {
      return group_of(other) != group_of(name) || abandoned(other);
    });
    if (all_abandoned) {
      reaped.push_back(name);
    }
  }
  for (const std::string& name : reaped) {
    unlink_segment(name);
  }
  return reaped;
}

Bytes available_host_memory() {
  std::int64_t available = std::min(memory_available().value_or(0), cgroup_headroom());
  struct statvfs shm {};
  if (statvfs(kShmDirectory, &shm) == 0) {
    available = std::min(available, static_cast<std::int64_t>(shm.f_bavail * shm.f_frsize));
  }
  return {std::max<std::int64_t>(available, 0)};
}

Control Control::create(std::string_view run_id, std::uint64_t layout_hash) {
  check(run_id.size() < sizeof(ControlSegment::run_id), "a run id fits its place");
  Control control(Segment::create(segment_name(run_id, "control"), {sizeof(ControlSegment)}));
  ControlSegment& header = *control;
  header.abi_version = kAbiVersion;
  header.control_bytes = sizeof(ControlSegment);
  header.layout_hash = layout_hash;
  run_id.copy(header.run_id, run_id.size());
  header.block_tokens = kBlockTokens;
  std::atomic_ref(header.magic)
      .store(kControlMagic, std::memory_order_release);  // last: now the rest counts
  return control;
}

Control Control::attach(std::string_view run_id) {
  Control control(Segment::attach(segment_name(run_id, "control"), Access::read_write));
  ControlSegment& header = *control;
  const std::string& name = control.segment_.name();
  if (control.segment_.size().n < static_cast<std::int64_t>(sizeof(ControlSegment)) ||
      std::atomic_ref(header.magic).load(std::memory_order_acquire) != kControlMagic) {
    fail(Exit::foreign,
         "shared memory {} is not a control segment of poise: its loader is of another build",
         name);
  }
  if (header.abi_version != kAbiVersion || header.control_bytes != sizeof(ControlSegment) ||
      header.block_tokens != kBlockTokens) {
    fail(Exit::foreign,
         "shared memory {} has layout version {} of {} bytes, this build has version {} of {} "
         "bytes: end the old "
         "loader first",
         name, header.abi_version, header.control_bytes, kAbiVersion, sizeof(ControlSegment));
  }
  if (control.run_id() != run_id) {
    fail(Exit::foreign, "shared memory {} says it belongs to run {}", name, control.run_id());
  }
  return control;
}

std::string Control::run_id() const {
  const char* begin = (**this).run_id;
  return {begin, strnlen(begin, sizeof(ControlSegment::run_id))};
}

}  // namespace poise
