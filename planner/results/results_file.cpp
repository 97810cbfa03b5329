#include "planner/results/results_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "common/files/regular_file.h"
#include "common/files/replace_file.h"
#include "common/liveness/progress.h"
#include "common/testing/failpoint.h"
#include "common/trouble.h"
#include "planner/results/result_line.h"
#include "planner/results/results_directory.h"

namespace poise {
namespace {

constexpr int kMaxWaiting = 256;  // lines
constexpr Seconds kLongestWait{1};
constexpr Bytes kMaxKept = kMiB * 64;
constexpr Bytes kLongestResult = kGiB;
constexpr std::size_t kResultsReadAtOnce = 1 << 20;

}  // namespace

ResultsFile::ResultsFile(std::filesystem::path path, int flags) : path_(std::move(path)) {
  // The run directory is private; the mode is what the user's umask gives the output.
  descriptor_ = fails_at("results.open")
                    ? -1
                    : ::open(path_.c_str(),
                             O_RDWR | O_APPEND | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | flags, 0666);
  if (descriptor_ < 0) {
    fail(Exit::busy, "{} cannot be opened: {}", shown(path_.string(), 300), std::strerror(errno));
  }
  struct stat status {};
  if (::fstat(descriptor_, &status) != 0 || !S_ISREG(status.st_mode)) {
    ::close(std::exchange(descriptor_, -1));
    fail(Exit::busy, "{} is not a regular file; use another run directory",
         shown(path_.string(), 300));
  }
}

ResultsFile ResultsFile::create(const std::filesystem::path& run_dir) {
  ResultsFile file(run_dir / kPartialName, O_CREAT | O_EXCL);
  sync_directory(run_dir);
  return file;
}

ResultsFile ResultsFile::resume(const std::filesystem::path& run_dir,
                                const std::vector<RequestId>& input_lines,
                                std::optional<Bytes> verified) {
  ResultsFile file(run_dir / kPartialName, 0);
  if (verified) {
    file.keep_first(*verified);
  }
  file.read_lines(input_lines);
  return file;
}

ResultsFile::ResultsFile(ResultsFile&& other) noexcept { *this = std::move(other); }

ResultsFile& ResultsFile::operator=(ResultsFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(descriptor_, other.descriptor_);
  std::swap(size_, other.size_);
  std::swap(done_, other.done_);
  std::swap(counts_, other.counts_);
  std::swap(cut_off_, other.cut_off_);
  std::swap(taken_back_, other.taken_back_);
  std::swap(kept_, other.kept_);
  std::swap(kept_bytes_, other.kept_bytes_);
  std::swap(waiting_, other.waiting_);
  std::swap(waiting_since_, other.waiting_since_);
  std::swap(broken_, other.broken_);
  return *this;
}

ResultsFile::~ResultsFile() {
  if (descriptor_ >= 0) {
    ::close(descriptor_);
  }
}

void ResultsFile::keep_first(Bytes size) {
  const Bytes all = RegularFile(path_).size();
  if (all <= size) {
    return;  // after a power failure there may be less
  }
  taken_back_ = all - size;
  if (::ftruncate(descriptor_, size.n) != 0) {
    fail_to_write("its last lines cannot be taken back", errno);
  }
  size_ = size.n;
  make_durable();
  size_ = 0;  // they are read next
}

void ResultsFile::read_lines(const std::vector<RequestId>& input_lines) {
  const RegularFile file(path_);
  std::vector<std::byte> buffer(kResultsReadAtOnce);
  std::string line;
  std::uint64_t number = 0;
  // Lines from the first one with zeros on. After a power failure, blocks of the file that were not durable
  // read as zeros, also before blocks that are there.
  int damaged = 0;
  const auto take = [&] {
    ++number;
    note_progress();
    const auto refuse = [&](const std::string& reason, std::uint64_t at) {
      fail(
          "{}, line {}: {}; delete that line to have it computed again, or use another run "
          "directory",
          shown(path_.string(), 300), at, reason);
    };
    if (damaged > 0 || line.find('\0') != std::string::npos) {
      if (++damaged > kMaxWaiting) {  // a power failure damages no lines that were durable
        refuse("zeros instead of a result", number + 1 - static_cast<std::uint64_t>(damaged));
      }
      line.clear();
      return;
    }
    ResultMark mark;
    try {
      mark = read_result_line(line, "");
    } catch (const Failure& failure) {
      refuse(fmt::format("not a result ({})", failure.what()), number);
    }
    if (!std::ranges::binary_search(input_lines, mark.line)) {
      refuse(fmt::format("a result for line {}, which the input does not have", mark.line.n),
             number);
    }
    if (is_done(mark.line)) {
      refuse(fmt::format("a second result for line {} of the input", mark.line.n), number);
    }
    mark_done(mark.line, mark.error);
    size_ += static_cast<std::int64_t>(line.size()) + 1;
    line.clear();
  };
  for (std::uint64_t offset = 0; offset < static_cast<std::uint64_t>(file.size().n);) {
    const std::size_t bytes =
        std::min<std::uint64_t>(buffer.size(), static_cast<std::uint64_t>(file.size().n) - offset);
    file.read_exactly(offset, {buffer.data(), bytes});
    offset += bytes;
    std::string_view rest(reinterpret_cast<const char*>(buffer.data()), bytes);
    for (auto end = rest.find('\n'); end != std::string_view::npos; end = rest.find('\n')) {
      line += rest.substr(0, end);
      rest.remove_prefix(end + 1);
      take();
    }
    line += rest;
    if (static_cast<std::int64_t>(line.size()) > kLongestResult.n) {
      fail("{}, line {}: longer than any result; use another run directory",
           shown(path_.string(), 300), number + 1);
    }
  }
  cut_off_ = file.size() - Bytes{size_};
  if (cut_off_ > Bytes{0}) {
    if (::ftruncate(descriptor_, size_) != 0) {
      fail_to_write("its damaged end cannot be cut off", errno);
    }
    make_durable();
  }
}

void ResultsFile::mark_done(RequestId line, bool error) {
  if (line.n >= done_.size()) {
    done_.resize(std::max<std::size_t>(line.n + std::size_t{1}, done_.size() * 2));
  }
  done_[line.n] = true;
  ++(error ? counts_.errors : counts_.answers);
}

void ResultsFile::append(RequestId line, bool error, std::string_view result, Seconds now) {
  check(!is_done(line), "an input line has one result");
  check(result.find('\n') == std::string_view::npos, "a result is one line");
  if (kept_bytes_ >= kMaxKept) {
    write_kept();
  }
  mark_done(line, error);
  kept_.emplace_back(result);
  kept_.back() += '\n';
  kept_bytes_ += {static_cast<std::int64_t>(kept_.back().size())};
  if (waiting_ == 0) {
    waiting_since_ = now;
  }
  write_kept();
  tick(now);
}

void ResultsFile::tick(Seconds now) {
  if (waiting_ >= kMaxWaiting || (waiting_ > 0 && now - waiting_since_ >= kLongestWait)) {
    make_durable();
  }
}

void ResultsFile::sync() {
  write_kept();
  make_durable();
}

void ResultsFile::take_back(Bytes size) {
  check_unbroken();
  check(size.n <= size_, "lines that are there are taken back");
  kept_.clear();
  size_ = size.n;
  if (::ftruncate(descriptor_, size_) != 0) {
    fail_to_write("its last lines cannot be taken back", errno);
  }
  make_durable();
  broken_ = true;  // done_ says what is no more
}

void ResultsFile::write_kept() {
  while (!kept_.empty()) {
    write_line(kept_.front());
    kept_bytes_ = kept_bytes_ - Bytes{static_cast<std::int64_t>(kept_.front().size())};
    kept_.pop_front();
    ++waiting_;
  }
}

void ResultsFile::write_line(std::string_view line) {
  check_unbroken();
  const DiskWait waiting;
  std::string_view rest = line;
  while (!rest.empty()) {
    const ssize_t written = write_at("results.write", descriptor_, rest.data(), rest.size());
    if (written < 0 && errno == EINTR) {
      continue;
    }
    if (written <= 0) {
      const int error = written < 0 ? errno : ENOSPC;
      // Half a line is taken back. Where even that fails it stays the torn tail that resume cuts.
      if (rest.size() < line.size() && ::ftruncate(descriptor_, size_) != 0) {
        broken_ = true;
      }
      fail_to_write("it cannot be written", error);
    }
    rest.remove_prefix(static_cast<std::size_t>(written));
    if (!rest.empty()) {
      failpoint("results.mid_line");
    }
  }
  failpoint("results.written");
  size_ += static_cast<std::int64_t>(line.size());
}

void ResultsFile::make_durable() {
  check_unbroken();
  const DiskWait waiting;
  if (fails_at("results.sync") || ::fdatasync(descriptor_) != 0) {
    broken_ = true;
    fail_to_write("its lines cannot be made durable", errno);
  }
  waiting_ = 0;
  check_still_ours();
}

// After a failed sync the kernel may have dropped the pages: only what a new process reads back
// counts, so this one does not go on.
void ResultsFile::check_unbroken() const {
  if (broken_) {
    fail_to_write("the disk failed earlier", EIO);
  }
}

void ResultsFile::check_still_ours() const {
  struct stat ours {
  }, there{};
  const auto refuse = [&](const char* what) {
    fail(Exit::busy,
         "{} was {} while the run wrote it; resume with --resume, which computes what is missing",
         shown(path_.string(), 300), what);
  };
  if (::fstat(descriptor_, &ours) != 0 || ours.st_nlink == 0) {
    refuse("deleted");
  }
  if (::stat(path_.c_str(), &there) != 0 || there.st_ino != ours.st_ino ||
      there.st_dev != ours.st_dev) {
    refuse("moved or replaced");
  }
  if (ours.st_size != size_) {
    refuse("changed by somebody else");
  }
}

void ResultsFile::fail_to_write(const char* what, int error) const {
  fail(
      Exit::busy,
      "{}: {}: {}; {} results are kept there, make room or give permission and go on with --resume",
      shown(path_.string(), 300), what, std::strerror(error), counts_.lines() - kept_.size());
}

}  // namespace poise
