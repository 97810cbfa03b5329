#include "planner/requests/request_lines.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string_view>
#include <utility>

#include "common/trouble.h"

namespace poise {
namespace {

constexpr std::size_t kReadAtOnce = 1 << 20;
constexpr std::string_view kByteOrderMark = "\xef\xbb\xbf";

struct Magic {
  std::string_view bytes;
  std::string_view is;
  std::string_view remedy;
};
constexpr std::string_view kUnpack = "unpack it first";
constexpr std::string_view kSaveAsUtf8 = "save it as UTF-8";
constexpr Magic kNotText[] = {
    {"\x1f\x8b", "compressed with gzip", kUnpack},
    {"\x28\xb5\x2f\xfd", "compressed with zstd", kUnpack},
    {"\xfd"
     "7zXZ",
     "compressed with xz", kUnpack},
    {"BZh", "compressed with bzip2", kUnpack},
    {"PK\x03\x04", "a zip archive", kUnpack},
    {"\xff\xfe", "UTF-16", kSaveAsUtf8},
    {"\xfe\xff", "UTF-16", kSaveAsUtf8},
};

bool blank(std::string_view text) {
  return text.find_first_not_of(" \t\r\v\f") == std::string_view::npos;
}

}  // namespace

RequestLines::RequestLines(const std::filesystem::path& path, Bytes longest,
                           std::function<void(std::span<const std::byte>)> on_bytes)
    : file_(path), longest_(longest), on_bytes_(std::move(on_bytes)), buffer_(kReadAtOnce) {
  refill();
  const std::string_view start(reinterpret_cast<const char*>(buffer_.data()), end_);
  for (const Magic& magic : kNotText) {
    if (start.starts_with(magic.bytes)) {
      fail("{}: the input is {}, not JSON lines; {}", shown(path.string(), 300), magic.is,
           magic.remedy);
    }
  }
  if (start.starts_with(kByteOrderMark)) {
    begin_ = kByteOrderMark.size();
  }
}

bool RequestLines::refill() {
  const auto left = static_cast<std::uint64_t>(file_.size().n) - offset_;
  const std::size_t bytes = std::min<std::uint64_t>(left, buffer_.size());
  begin_ = 0;
  end_ = bytes;
  if (bytes == 0) {
    file_.check_unchanged();
    return false;
  }
  const std::span<std::byte> into(buffer_.data(), bytes);
  file_.read_exactly(offset_, into);
  offset_ += bytes;
  if (on_bytes_) {
    on_bytes_(into);
  }
  return true;
}

bool RequestLines::take_piece(Line& line) {
  const char* from = reinterpret_cast<const char*>(buffer_.data()) + begin_;
  const std::size_t there = end_ - begin_;
  const void* newline = std::memchr(from, '\n', there);
  const std::size_t piece = newline != nullptr
                                ? static_cast<std::size_t>(static_cast<const char*>(newline) - from)
                                : there;
  if (!line.too_long && line.text.size() + piece <= static_cast<std::size_t>(longest_.n)) {
    line.text.append(from, piece);
  } else {
    line.too_long = true;
    line.text = {};
  }
  begin_ += piece + (newline != nullptr ? 1 : 0);
  return newline != nullptr;
}

std::optional<RequestLines::Line> RequestLines::next() {
  while (begin_ < end_ || refill()) {
    Line line;
    while (!take_piece(line) && refill()) {
    }
    if (++lines_ > std::numeric_limits<std::uint32_t>::max()) {
      fail("{}: more than {} lines; split the input", shown(file_.path().string(), 300),
           std::numeric_limits<std::uint32_t>::max());
    }
    line.number = {static_cast<std::uint32_t>(lines_)};
    if (line.text.ends_with('\r')) {
      line.text.pop_back();
    }
    if (line.too_long || !blank(line.text)) {
      return line;
    }
  }
  return std::nullopt;
}

}  // namespace poise
