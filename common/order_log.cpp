#include "common/order_log.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <system_error>

#include "common/channel.h"
#include "common/testing/failpoint.h"
#include "common/trouble.h"

namespace poise {
namespace {

constexpr char kMagic[8] = {'P', 'O', 'I', 'S', 'E', 'L', 'O', 'G'};
constexpr std::uint32_t kVersion = 1;
constexpr std::uint32_t kMaxHeader = 1 << 20;
constexpr std::size_t kGroup = 1 << 20;

struct FileHeader {
  char magic[8];
  std::uint32_t version;
  std::uint32_t header_bytes;
};
static_assert(sizeof(FileHeader) == 16);

struct RecordHeader {
  std::uint32_t payload_bytes;
  std::uint32_t payload_crc;
  std::uint64_t time_ns;
  std::uint32_t
      header_crc;  // of the 16 bytes before it: a damaged length is not mistaken for a torn tail
  std::uint32_t unused;  // 0
};
static_assert(sizeof(RecordHeader) == 24);

std::uint32_t header_crc(const RecordHeader& header) {
  return crc32c(std::as_bytes(std::span(&header, 1)).first(offsetof(RecordHeader, header_crc)));
}

constexpr auto kCrcTable = [] {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) {
      crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82f63b78u : 0u);
    }
    table[i] = crc;
  }
  return table;
}();

std::uint32_t crc32c_table(const std::byte* data, std::size_t size, std::uint32_t crc) {
  for (std::size_t i = 0; i < size; ++i) {
    crc = (crc >> 8) ^ kCrcTable[(crc ^ static_cast<std::uint32_t>(data[i])) & 0xff];
  }
  return crc;
}

#ifdef __x86_64__
__attribute__((target("sse4.2"))) std::uint32_t crc32c_sse42(const std::byte* data,
                                                             std::size_t size, std::uint32_t crc) {
  std::uint64_t wide = crc;
  for (; size >= 8; data += 8, size -= 8) {
    std::uint64_t word;
    std::memcpy(&word, data, 8);
    wide = __builtin_ia32_crc32di(wide, word);
  }
  return crc32c_table(data, size, static_cast<std::uint32_t>(wide));
}
#endif

std::uint64_t now_ns() {
  return static_cast<std::uint64_t>(
      std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count());
}

std::string system_text(int error) { return std::generic_category().message(error); }

template <typename T>
void append_bytes(std::vector<std::byte>& to, const T& value) {
  const auto* bytes = reinterpret_cast<const std::byte*>(&value);
  to.insert(to.end(), bytes, bytes + sizeof value);
}

// Reads exactly `size` bytes; false at the end of the file.
bool read_at(int descriptor, const std::string& path, std::uint64_t offset, void* to,
             std::size_t size) {
  auto* bytes = static_cast<char*>(to);
  for (std::size_t done = 0; done < size;) {
    const ssize_t got =
        pread(descriptor, bytes + done, size - done, static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got < 0) {
      fail("order log {} cannot be read: {}", path, system_text(errno));
    }
    if (got == 0) {
      return false;
    }
    done += static_cast<std::size_t>(got);
  }
  return true;
}

}  // namespace

std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t before) {
  const std::uint32_t crc = ~before;
#ifdef __x86_64__
  if (__builtin_cpu_supports("sse4.2")) {
    return ~crc32c_sse42(bytes.data(), bytes.size(), crc);
  }
#endif
  return ~crc32c_table(bytes.data(), bytes.size(), crc);
}

OrderLog::OrderLog(const std::filesystem::path& path, const std::string& header_json)
    : path_(path.string()) {
  check(header_json.size() <= kMaxHeader, "an order log's header is small");
  std::uint64_t end = 0;
  if (std::error_code ignored;
      std::filesystem::exists(path, ignored) && std::filesystem::file_size(path, ignored) > 0) {
    OrderLogReader earlier(path);
    while (auto record = earlier.next()) {
      began_ns_ = record->time_ns;  // time goes on where the earlier process left it
    }
    end = std::filesystem::file_size(path) - static_cast<std::uint64_t>(earlier.torn_tail().n);
  }
  descriptor_ = fails_at("order_log.open")
                    ? -1
                    : open(path_.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
  if (descriptor_ < 0 || ftruncate(descriptor_, static_cast<off_t>(end)) != 0 ||
      lseek(descriptor_, 0, SEEK_END) < 0) {
    fail(Exit::busy, "order log {} cannot be written: {}", path_, system_text(errno));
  }
  if (end == 0) {
    FileHeader header{.magic = {},
                      .version = kVersion,
                      .header_bytes = static_cast<std::uint32_t>(header_json.size())};
    std::memcpy(header.magic, kMagic, sizeof kMagic);
    append_bytes(pending_, header);
    const auto* text = reinterpret_cast<const std::byte*>(header_json.data());
    pending_.insert(pending_.end(), text, text + header_json.size());
  }
  began_ns_ = now_ns() - began_ns_;
  flush();
}

OrderLog::OrderLog() : began_ns_(now_ns()) {}

OrderLog::~OrderLog() {
  if (descriptor_ < 0) {
    return;
  }
  try {
    flush();
  } catch (const std::exception&) {
    // The log's last records are lost; the process is already ending with another
    // failure.
  }
  close(descriptor_);
}

void OrderLog::append(std::span<const std::byte> message) {
  if (descriptor_ < 0) {
    return;
  }
  RecordHeader header{.payload_bytes = static_cast<std::uint32_t>(message.size()),
                      .payload_crc = crc32c(message),
                      .time_ns = now_ns() - began_ns_,
                      .header_crc = 0,
                      .unused = 0};
  header.header_crc = header_crc(header);
  append_bytes(pending_, header);
  pending_.insert(pending_.end(), message.begin(), message.end());
  pending_.resize(
      static_cast<std::size_t>(round_up(static_cast<std::int64_t>(pending_.size()), 8)));
  if (pending_.size() >= kGroup) {
    flush();
  }
}

void OrderLog::flush() {
  std::size_t done = 0;
  while (done < pending_.size()) {
    const ssize_t wrote = write_at("order_log.write", descriptor_, pending_.data() + done,
                                   pending_.size() - done);
    if (wrote < 0 && errno == EINTR) {
      continue;
    }
    if (wrote <= 0) {
      const std::string reason = system_text(errno);
      pending_.clear();
      fail(Exit::busy, "order log {} cannot be written: {}", path_, reason);
    }
    done += static_cast<std::size_t>(wrote);
  }
  pending_.clear();
}

OrderLogReader::OrderLogReader(const std::filesystem::path& path) : path_(path.string()) {
  descriptor_ = open(path_.c_str(), O_RDONLY | O_CLOEXEC);
  struct stat status {};
  if (descriptor_ < 0 || fstat(descriptor_, &status) != 0 || !S_ISREG(status.st_mode)) {
    const std::string reason = descriptor_ < 0 ? system_text(errno) : "not a regular file";
    if (descriptor_ >= 0) {
      close(descriptor_);
    }
    fail("order log {} cannot be read: {}", path_, reason);
  }
  size_ = static_cast<std::uint64_t>(status.st_size);
  FileHeader header{};
  const bool whole = read_at(descriptor_, path_, 0, &header, sizeof header);
  if (!whole || std::memcmp(header.magic, kMagic, sizeof kMagic) != 0 ||
      header.version != kVersion || header.header_bytes > kMaxHeader ||
      sizeof header + header.header_bytes > size_) {
    close(descriptor_);
    fail("{} is not an order log of this version of poise", path_);
  }
  header_.resize(header.header_bytes);
  read_at(descriptor_, path_, sizeof header, header_.data(), header_.size());
  offset_ = sizeof header + header.header_bytes;
}

OrderLogReader::~OrderLogReader() { close(descriptor_); }

void OrderLogReader::rewind() {
  offset_ = sizeof(FileHeader) + header_.size();
  number_ = 0;
  torn_ = {};
}

std::optional<LoggedMessage> OrderLogReader::torn() {
  torn_ = {static_cast<std::int64_t>(size_ - offset_)};
  return std::nullopt;
}

std::optional<LoggedMessage> OrderLogReader::next() {
  const std::uint64_t left = size_ - offset_;
  RecordHeader header{};
  if (left == 0 || left < sizeof header ||
      !read_at(descriptor_, path_, offset_, &header, sizeof header)) {
    return torn();
  }
  const bool header_good =
      header.header_crc == header_crc(header) && header.unused == 0 &&
      header.payload_bytes <= kMaxMessage.n;
  const auto whole = static_cast<std::uint64_t>(
      round_up(static_cast<std::int64_t>(sizeof header) + header.payload_bytes, 8));
  if (header_good && whole > left) {
    return torn();
  }
  if (header_good) {
    LoggedMessage record{.number = number_, .time_ns = header.time_ns, .bytes = {}};
    record.bytes.resize(whole - sizeof header);
    read_at(descriptor_, path_, offset_ + sizeof header, record.bytes.data(), record.bytes.size());
    const bool padded = std::ranges::all_of(std::span(record.bytes).subspan(header.payload_bytes),
                                            [](std::byte byte) { return byte == std::byte{0}; });
    record.bytes.resize(header.payload_bytes);
    if (padded && crc32c(record.bytes) == header.payload_crc) {
      offset_ += whole;
      ++number_;
      return record;
    }
    if (whole == left) {  // nothing behind it: the write was cut off
      return torn();
    }
  }
  fail("order log {} is damaged at record {} (byte {}): what follows cannot be trusted", path_,
       number_, offset_);
}

}  // namespace poise
