#pragma once
// Opens files from outside so that none can block the process or crash it: only regular files are
// accepted. Symbolic links are followed; a link that loops, is broken, or ends in a directory,
// device, pipe or socket is refused. Files are read with pread, never mapped: if another process
// truncates one, that is an error and not a signal. Sizes are bounded before reading. A RegularFile
// is movable, closes on destruction, and may be read by several threads at once.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

#include "common/units.h"

namespace poise {

class RegularFile {
 public:
  // Fails if `path` is no regular file; the sentence says what it is.
  explicit RegularFile(const std::filesystem::path& path);
  RegularFile(RegularFile&&) noexcept;
  RegularFile& operator=(RegularFile&&) noexcept;
  ~RegularFile();

  const std::filesystem::path& path() const { return path_; }
  Bytes size() const { return size_; }  // when it was opened
  int descriptor() const { return descriptor_; }
  // Fills `out` from `offset`; fails if the file is too short or cannot be read.
  void read_exactly(std::uint64_t offset, std::span<std::byte> out) const;
  // Fails if the file's size or change time differs from when it was opened.
  void check_unchanged() const;

 private:
  std::filesystem::path path_;
  Bytes size_{};
  std::int64_t changed_ns_ = 0;
  int descriptor_ = -1;
};

// The text of a file of at most `limit` bytes; fails with both numbers if it is larger.
std::string read_text_file(const std::filesystem::path& path, Bytes limit);

// `text` made fit for a one-line message: control characters and invalid UTF-8 become \xNN, and it is
// cut at about `limit` bytes.
std::string shown(std::string_view text, std::size_t limit = 80);

}  // namespace poise
