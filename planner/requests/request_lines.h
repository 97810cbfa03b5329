#pragma once
// The lines of an input file, one after the other, in bounded memory. A byte-order mark at the start and
// CRLF are removed, blank lines are counted and skipped, the last line needs no newline, and a line
// longer than the limit is skipped without being stored. Fails if the file is not regular, is plainly no
// text (gzip, zip, zstd, UTF-16) or changes while it is read. One thread.

#include <cstddef>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "common/files/regular_file.h"
#include "common/units.h"

namespace poise {

inline constexpr Bytes kLongestLine = kMiB * 64;

class RequestLines {
 public:
  struct Line {
    RequestId number;
    std::string text;  // empty where the line is too long
    bool too_long = false;
  };

  // `on_bytes` sees every byte of the file once, in order (for a digest); it may be empty.
  explicit RequestLines(const std::filesystem::path& path, Bytes longest = kLongestLine,
                        std::function<void(std::span<const std::byte>)> on_bytes = {});

  // The next line that is not blank; nothing at the file's end.
  std::optional<Line> next();

 private:
  bool refill();
  // Appends what is there of the current line; true once its end was seen.
  bool take_piece(Line& line);

  RegularFile file_;
  Bytes longest_;
  std::function<void(std::span<const std::byte>)> on_bytes_;
  std::vector<std::byte> buffer_;
  std::size_t begin_ = 0, end_ = 0;  // what of buffer_ was read and not yet taken
  std::uint64_t offset_ = 0;         // of the file, behind buffer_
  std::uint64_t lines_ = 0;
};

}  // namespace poise
