#pragma once
// Files that others wrote, opened so that none of them can hang or surprise us: only regular files
// (symbolic links are followed, a link that loops, breaks or ends in a directory, device, pipe or
// socket is refused), read with pread, never mapped: a file that somebody cuts short gives an error
// then, not a signal. What is read is bounded before it is read. A RegularFile is movable, closes
// on destruction, and may be read from several threads at once.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

#include "common/units.h"

namespace poise {

class RegularFile {
 public:
  // Fails with a sentence that names `path` and what it is instead of a regular file.
  explicit RegularFile(const std::filesystem::path& path);
  RegularFile(RegularFile&&) noexcept;
  RegularFile& operator=(RegularFile&&) noexcept;
  ~RegularFile();

  const std::filesystem::path& path() const { return path_; }
  Bytes size() const { return size_; }  // when it was opened
  int descriptor() const { return descriptor_; }
  // Fills `out` from `offset`; fails where the file ends before that, or the disk errs.
  void read_exactly(std::uint64_t offset, std::span<std::byte> out) const;
  // Fails if the file's size or time of change is not what it was when it was opened.
  void check_unchanged() const;

 private:
  std::filesystem::path path_;
  Bytes size_{};
  std::int64_t changed_ns_ = 0;
  int descriptor_ = -1;
};

// The whole of a file of at most `limit` bytes; fails with both numbers where it is larger.
std::string read_text_file(const std::filesystem::path& path, Bytes limit);

// `text` as it may stand in a one-line message: control characters and invalid UTF-8 shown as \xNN,
// and no more than about `limit` bytes of it.
std::string shown(std::string_view text, std::size_t limit = 80);

}  // namespace poise
