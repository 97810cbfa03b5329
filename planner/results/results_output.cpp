#include "planner/results/results_output.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <span>
#include <string>
#include <vector>

#include "common/files/regular_file.h"
#include "common/files/replace_file.h"
#include "common/files/sha256.h"
#include "common/liveness/progress.h"
#include "common/testing/failpoint.h"
#include "common/trouble.h"
#include "planner/results/result_line.h"
#include "planner/results/results_directory.h"

namespace poise {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kCopyAtOnce = 1 << 20;

std::string named(const fs::path& path) { return shown(path.string(), 300); }

fs::path directory_of(const fs::path& output) {
  const fs::path parent = output.parent_path();
  return parent.empty() ? fs::path(".") : parent;
}

[[noreturn]] void fail_because_it_exists(const fs::path& output, Exit code) {
  fail(code,
       "{} exists already and was not written by this run; say --overwrite (with --resume, where "
       "this "
       "run has begun), or name another output",
       named(output));
}

[[noreturn]] void fail_to_publish(const fs::path& output, int error) {
  fail(Exit::busy,
       "{} cannot be written: {}; all results are kept in the run directory, go on with --resume",
       named(output), std::strerror(error));
}

// Renames `from` to `to`, on one file system; false where they lie on two.
bool moved(const fs::path& from, const fs::path& to, bool overwrite) {
  if (fails_at("results.rename")) {
    fail_to_publish(to, errno);
  }
  if (overwrite) {
    if (::rename(from.c_str(), to.c_str()) == 0) {
      return true;
    }
  } else {
    // One step that does not replace; file systems without it have link, which does not either.
    if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE) == 0) {
      return true;
    }
    if (errno == EINVAL || errno == ENOSYS) {
      if (::link(from.c_str(), to.c_str()) == 0) {
        if (::unlink(from.c_str()) != 0) {
          fail_to_publish(to, errno);
        }
        return true;
      }
    }
  }
  if (errno == EXDEV) {
    return false;
  }
  if (errno == EEXIST) {
    fail_because_it_exists(to, Exit::busy);
  }
  fail_to_publish(to, errno);
}

void copy_bytes(const fs::path& from, const fs::path& to, const fs::path& output) {
  const RegularFile source(from);
  const OwnDescriptor copy(
      ::open(to.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0666));
  if (copy.get() < 0) {
    fail_to_publish(output, errno);
  }
  std::vector<std::byte> buffer(kCopyAtOnce);
  const auto size = static_cast<std::uint64_t>(source.size().n);
  int error = 0;
  for (std::uint64_t offset = 0; offset < size && error == 0;) {
    const std::size_t bytes = std::min<std::uint64_t>(buffer.size(), size - offset);
    const DiskWait waiting;
    source.read_exactly(offset, {buffer.data(), bytes});
    failpoint("results.copying");
    const ssize_t written = ::write(copy.get(), buffer.data(), bytes);
    if (written > 0) {
      offset += static_cast<std::uint64_t>(written);
    } else if (written == 0 || errno != EINTR) {
      error = written == 0 ? ENOSPC : errno;
    }
  }
  const DiskWait waiting;
  if (error == 0 && ::fsync(copy.get()) != 0) {
    error = errno;
  }
  if (error != 0) {
    ::unlink(to.c_str());
    fail_to_publish(output, error);
  }
}

// A name beside the output, always the same for it, so that a copy that a crash left is replaced.
fs::path copy_beside(const fs::path& output) {
  const std::string name = output.filename().string();
  const Digest digest = sha256(std::as_bytes(std::span(name.data(), name.size())));
  return directory_of(output) / (".poise-copy-" + to_hex(digest).substr(0, 16));
}

}  // namespace

void check_output(const fs::path& output, const fs::path& input, bool overwrite) {
  if (!output.has_filename() || output.filename() == "." || output.filename() == "..") {
    fail("{} names no file for the output", named(output));
  }
  std::error_code error;
  if (fs::equivalent(output, input, error)) {
    fail("{} is input and output at once; name another output", named(output));
  }
  const fs::path directory = directory_of(output);
  if (!fs::is_directory(directory, error)) {
    fail("{}: the output's directory is not there; make it, or name another output",
         named(directory));
  }
  const fs::file_status link = fs::symlink_status(output, error);
  if (fs::exists(link)) {
    const fs::file_status status = fs::status(output, error);
    if (fs::exists(status) && !fs::is_regular_file(status)) {
      fail("{} is not a regular file; name another output", named(output));
    }
    if (!overwrite) {
      fail_because_it_exists(output, Exit::cannot_start);
    }
  }
  if (::access(directory.c_str(), W_OK | X_OK) != 0) {
    fail(Exit::busy, "{} cannot be written: {}; name another output, or give permission",
         named(directory), std::strerror(errno));
  }
}

void publish(ResultsFile results, const fs::path& run_dir, const fs::path& output, bool overwrite,
             const std::vector<RequestId>& input_lines) {
  check(results.counts().lines() == input_lines.size() &&
            std::ranges::all_of(input_lines, [&](RequestId line) { return results.is_done(line); }),
        "a run is finished when every input line has its result");
  const DiskWait waiting;
  results.sync();
  struct stat status {};
  if (::fsync(results.descriptor()) != 0 || ::fstat(results.descriptor(), &status) != 0) {
    fail_to_publish(output, errno);
  }
  const fs::path absolute = fs::absolute(output);
  const fs::path partial = run_dir / kPartialName;
  // Noted first: from the rename on, the run directory holds no other trace of what was written.
  write_publication(run_dir, {absolute, Bytes{status.st_size}});
  failpoint("results.before_rename");
  if (!moved(partial, absolute, overwrite)) {
    const fs::path copy = copy_beside(absolute);
    copy_bytes(partial, copy, output);
    if (!same_bytes(partial, copy)) {
      ::unlink(copy.c_str());
      fail(Exit::busy, "{}: the copy of the results differs from what was written; the disk errs",
           named(output));
    }
    try {
      check(moved(copy, absolute, overwrite), "a copy beside the output is on its file system");
    } catch (...) {
      ::unlink(copy.c_str());
      throw;
    }
    sync_directory(directory_of(absolute));
    ::unlink(partial.c_str());
  } else {
    sync_directory(directory_of(absolute));
  }
  sync_directory(run_dir);
}

std::optional<ResultCounts> count_published(const fs::path& run_dir,
                                            const std::vector<RequestId>& input_lines) {
  const auto publication = read_publication(run_dir);
  std::error_code none;
  if (!publication || !fs::is_regular_file(publication->output, none)) {
    return std::nullopt;
  }
  const DiskWait waiting;
  ResultCounts counts;
  std::ifstream file(publication->output, std::ios::binary);
  for (std::string line; std::getline(file, line);) {
    try {
      ++(read_result_line(line, "").error ? counts.errors : counts.answers);
    } catch (const Failure&) {
      return std::nullopt;
    }
    note_progress();
  }
  return counts.lines() == input_lines.size() ? std::optional(counts) : std::nullopt;
}

}  // namespace poise
