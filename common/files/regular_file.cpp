#include "common/files/regular_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "common/trouble.h"

namespace poise {
namespace {

std::string_view kind_of(mode_t mode) {
  switch (mode & S_IFMT) {
    case S_IFDIR:
      return "a directory";
    case S_IFCHR:
    case S_IFBLK:
      return "a device";
    case S_IFIFO:
      return "a pipe";
    case S_IFSOCK:
      return "a socket";
    default:
      return "something else";
  }
}

[[noreturn]] void fail_to_open(const std::filesystem::path& path, int error) {
  struct stat link {};
  const bool is_link = ::lstat(path.c_str(), &link) == 0 && S_ISLNK(link.st_mode);
  if (error == ELOOP) {
    fail("{} is a symbolic link that leads back to itself; a file is needed", shown(path.string()));
  }
  if (error == ENOENT && is_link) {
    fail("{} is a symbolic link to a file that is not there; fetch the model again",
         shown(path.string()));
  }
  if (error == ENOENT) {
    fail("{} is not there", shown(path.string()));
  }
  fail("{} cannot be opened: {}", shown(path.string()), std::strerror(error));
}

// Length of the valid UTF-8 character at the start of `text`, 0 where there is none.
std::size_t character_length(std::string_view text) {
  const auto lead = static_cast<unsigned char>(text[0]);
  if (lead < 0x80) {
    return 1;
  }
  const std::size_t length = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || text.size() < length) {
    return 0;
  }
  std::uint32_t code = lead & (0x7fu >> length);
  for (std::size_t i = 1; i < length; ++i) {
    const auto next = static_cast<unsigned char>(text[i]);
    if ((next & 0xc0u) != 0x80u) {
      return 0;
    }
    code = (code << 6) | (next & 0x3fu);
  }
  const std::uint32_t least = length == 4 ? 0x10000u : length == 3 ? 0x800u : 0x80u;
  const bool surrogate = code >= 0xd800u && code <= 0xdfffu;
  return code < least || code > 0x10ffffu || surrogate ? 0 : length;
}

// Control characters, and those that break or turn a line in a terminal.
bool prints_on_one_line(std::string_view character) {
  const auto lead = static_cast<unsigned char>(character[0]);
  if (character.size() == 1) {
    return lead >= 0x20 && lead != 0x7f;
  }
  const bool c1_control =
      lead == 0xc2 && static_cast<unsigned char>(character[1]) < 0xa0;  // U+0080 … U+009F
  const bool separator_or_bidi =
      lead == 0xe2 && (character[1] == '\x80' || character[1] == '\x81');  // U+2000 … U+207F
  return !c1_control && !separator_or_bidi;
}

}  // namespace

RegularFile::RegularFile(const std::filesystem::path& path) : path_(path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) {
    fail_to_open(path, errno);
  }
  // Before opening: to open a device or a pipe can already do something.
  if (!S_ISREG(status.st_mode)) {
    fail("{} is {}; a regular file is needed", shown(path.string()), kind_of(status.st_mode));
  }
  descriptor_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor_ < 0) {
    fail_to_open(path, errno);
  }
  if (::fstat(descriptor_, &status) != 0 || !S_ISREG(status.st_mode)) {
    ::close(std::exchange(descriptor_, -1));
    fail("{} changed its kind while it was opened", shown(path.string()));
  }
  size_ = {status.st_size};
  changed_ns_ = status.st_mtim.tv_sec * 1'000'000'000 + status.st_mtim.tv_nsec;
}

RegularFile::RegularFile(RegularFile&& other) noexcept
    : path_(std::move(other.path_)),
      size_(other.size_),
      changed_ns_(other.changed_ns_),
      descriptor_(std::exchange(other.descriptor_, -1)) {}

RegularFile& RegularFile::operator=(RegularFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(size_, other.size_);
  std::swap(changed_ns_, other.changed_ns_);
  std::swap(descriptor_, other.descriptor_);
  return *this;
}

RegularFile::~RegularFile() {
  if (descriptor_ >= 0) {
    ::close(descriptor_);
  }
}

void RegularFile::read_exactly(std::uint64_t offset, std::span<std::byte> out) const {
  while (!out.empty()) {
    const ssize_t got = ::pread(descriptor_, out.data(), out.size(), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got < 0) {
      fail("{} cannot be read at byte {}: {}", shown(path_.string()), offset, std::strerror(errno));
    }
    if (got == 0) {
      fail("{} ends at byte {}, before what it must hold; was it changed meanwhile?",
           shown(path_.string()), offset);
    }
    offset += static_cast<std::uint64_t>(got);
    out = out.subspan(static_cast<std::size_t>(got));
  }
}

void RegularFile::check_unchanged() const {
  struct stat status {};
  if (::fstat(descriptor_, &status) != 0) {
    fail("{} cannot be examined: {}", shown(path_.string()), std::strerror(errno));
  }
  if (status.st_size != size_.n ||
      status.st_mtim.tv_sec * 1'000'000'000 + status.st_mtim.tv_nsec != changed_ns_) {
    fail("{} was changed while it was read; start again when no process writes to it",
         shown(path_.string()));
  }
}

std::string read_text_file(const std::filesystem::path& path, Bytes limit) {
  const RegularFile file(path);
  if (file.size() > limit) {
    fail("{} is {} bytes long; at most {} are read", shown(path.string()), file.size().n, limit.n);
  }
  std::string text(static_cast<std::size_t>(file.size().n), '\0');
  file.read_exactly(0, std::as_writable_bytes(std::span(text)));
  return text;
}

std::string shown(std::string_view text, std::size_t limit) {
  std::string line;
  while (!text.empty()) {
    if (line.size() >= limit) {
      return line + "…";
    }
    const std::size_t length = character_length(text);
    if (length > 0 && prints_on_one_line(text.substr(0, length))) {
      line += text.substr(0, length);
      text.remove_prefix(length);
    } else {
      line += fmt::format("\\x{:02x}", static_cast<unsigned char>(text[0]));
      text.remove_prefix(1);
    }
  }
  return line;
}

}  // namespace poise
