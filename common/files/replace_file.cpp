#include "common/files/replace_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "common/files/regular_file.h"
#include "common/liveness/progress.h"
#include "common/testing/failpoint.h"
#include "common/trouble.h"

namespace poise {
namespace {

std::string_view remedy(int error) {
  switch (error) {
    case ENOSPC:
    case EDQUOT:
      return "make room on its disk";
    case EFBIG:
      return "raise the limit on the size of files, ulimit -f";
    case EACCES:
    case EPERM:
      return "give this user permission to write there";
    case EROFS:
      return "choose a place on a disk that is mounted for writing";
    case EISDIR:
    case ENOTDIR:
    case ENOTEMPTY:
    case ELOOP:
      return "remove what stands in its place";
    case ENOENT:
      return "make its folder";
    default:
      return "look after its disk";
  }
}

// 0, or what went wrong.
int write_whole(int descriptor, std::string_view content) {
  while (!content.empty()) {
    const ssize_t written =
        write_at("replace_file.write", descriptor, content.data(), content.size());
    if (written < 0 && errno == EINTR) {
      continue;
    }
    if (written <= 0) {
      return written < 0 ? errno : ENOSPC;
    }
    content.remove_prefix(static_cast<std::size_t>(written));
  }
  return 0;
}

// The same.
int write_new_file(const std::filesystem::path& path, std::string_view content, bool durable) {
  const int descriptor =
      fails_at("replace_file.open")
          ? -1
          : ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (descriptor < 0) {
    return errno;
  }
  int error = write_whole(descriptor, content);
  if (error == 0 && durable && (fails_at("replace_file.sync") || ::fsync(descriptor) != 0)) {
    error = errno;
  }
  if (::close(descriptor) != 0 && error == 0) {  // some file systems notice a full disk only now
    error = errno;
  }
  return error;
}

}  // namespace

OwnDescriptor::~OwnDescriptor() {
  if (descriptor_ >= 0) {
    ::close(descriptor_);
  }
}

void fail_to_write(const std::filesystem::path& path, int error) {
  fail(Exit::busy, "{} cannot be written: {} ({})", shown(path.string(), 300), std::strerror(error),
       remedy(error));
}

void sync_directory(const std::filesystem::path& directory) {
  const DiskWait waiting;
  const OwnDescriptor opened(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  // Some file systems do not sync directories and say EINVAL; they have nothing to promise.
  if (opened.get() < 0 ||
      ((fails_at("directory.sync") || ::fsync(opened.get()) != 0) && errno != EINVAL)) {
    fail_to_write(directory, errno);
  }
}

void replace_file(const std::filesystem::path& path, std::string_view content, Replacement how) {
  const DiskWait waiting;
  std::filesystem::path fresh = path;
  fresh += how.shared ? fmt::format(".{}.new", ::getpid()) : ".new";
  if (const int error = write_new_file(fresh, content, how.durable); error != 0) {
    ::unlink(fresh.c_str());
    fail_to_write(fresh, error);
  }
  if (fails_at("replace_file.rename") || std::rename(fresh.c_str(), path.c_str()) != 0) {
    const int error = errno;
    ::unlink(fresh.c_str());
    fail_to_write(path, error);
  }
  if (how.durable) {
    sync_directory(path.has_parent_path() ? path.parent_path() : ".");
  }
}

}  // namespace poise
