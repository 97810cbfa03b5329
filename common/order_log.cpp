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
#include <fstream>
#include <iterator>
#include <system_error>
#include <utility>

#include "common/channel.h"
#include "common/liveness/progress.h"
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

// The last of each is copied to the beginning of a new segment.
constexpr messages::Body kCarriedKinds[] = {messages::Body::PoolGrant, messages::Body::Configure,
                                            messages::Body::Ready, messages::Body::WeightsHeld,
                                            messages::Body::PolicyInForce};

std::string system_text(int error) { return std::generic_category().message(error); }

bool is_nul(std::span<const std::byte> bytes) {
  return std::ranges::all_of(bytes, [](std::byte byte) { return byte == std::byte{0}; });
}

// A process was killed before it wrote the header, or the power went before that came to the disk.
bool has_no_header(const std::filesystem::path& file) {
  std::ifstream from(file, std::ios::binary);
  std::array<char, 4096> some{};
  while (from) {
    from.read(some.data(), static_cast<std::streamsize>(some.size()));
    const auto read = static_cast<std::size_t>(from.gcount());
    if (!is_nul(std::as_bytes(std::span(some).first(read)))) {
      return false;
    }
  }
  return from.eof();
}

template <typename T>
void append_bytes(std::vector<std::byte>& to, const T& value) {
  const auto* bytes = reinterpret_cast<const std::byte*>(&value);
  to.insert(to.end(), bytes, bytes + sizeof value);
}

void append_record(std::vector<std::byte>& to, std::span<const std::byte> message,
                   std::uint64_t time_ns) {
  RecordHeader header{.payload_bytes = static_cast<std::uint32_t>(message.size()),
                      .payload_crc = crc32c(message),
                      .time_ns = time_ns,
                      .header_crc = 0,
                      .unused = 0};
  header.header_crc = header_crc(header);
  append_bytes(to, header);
  to.insert(to.end(), message.begin(), message.end());
  to.resize(static_cast<std::size_t>(round_up(static_cast<std::int64_t>(to.size()), 8)));
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

OrderLog::OrderLog(const std::filesystem::path& path, const std::string& header_json,
                   const OrderLogLimits& limits, bool after_damage)
    : log_(path), header_(header_json), limits_(limits) {
  check(header_json.size() <= kMaxHeader / 2, "an order log's header is small");
  auto files = segment_files(path);
  while (!files.empty() && has_no_header(files.back())) {
    std::filesystem::remove(files.back());
    files.pop_back();
  }
  if (!files.empty()) {
    go_on(files.back(), !after_damage);
  }
  segment_ += after_damage ? 1 : 0;  // what was there has a number, too
  if (descriptor_ < 0) {
    begin_segment(after_damage);
  }
  began_ns_ = now_ns() - began_ns_;
  flush();
}

OrderLog::OrderLog() : began_ns_(now_ns()) {}

std::unique_ptr<OrderLog> OrderLog::held(const std::string& header_json,
                                         const OrderLogLimits& limits) {
  check(header_json.size() <= kMaxHeader / 2, "an order log's header is small");
  auto log = std::make_unique<OrderLog>();
  log->held_ = true;
  log->header_ = header_json;
  log->limits_ = limits;
  return log;
}

void OrderLog::begin(const std::filesystem::path& path) {
  check(held_, "a log that holds its records begins once");
  log_ = path;
  check(segment_files(log_).empty(), "a log begins where there is none");
  held_ = false;
  const auto records = std::exchange(pending_, {});
  auto carried = std::exchange(carried_, {});  // copies of these records, for the next segment
  begin_segment();
  pending_ = records;
  carried_ = std::move(carried);
  segment_bytes_ += records.size();
  flush();
}

// Behind the last record of an earlier process: in its segment, where that keeps the same.
void OrderLog::go_on(const std::filesystem::path& file, bool in_its_segment) {
  std::uint64_t end = 0;
  {
    OrderLogReader earlier(file, OrderLogReader::Files::one_alone);
    const SegmentFacts facts = segment_of(earlier.header_json(), file.string());
    segment_ = facts.number;
    while (const auto record = earlier.next()) {
      began_ns_ = record->time_ns;  // time goes on where the earlier process left it
      if (is_limited()) {
        const messages::Message* message = message_in(record->bytes);
        std::vector<std::byte> bytes;
        append_record(bytes, record->bytes, record->time_ns);
        carry(message != nullptr ? message->body_type() : messages::Body::NONE, bytes);
      }
    }
    end = std::filesystem::file_size(file) - static_cast<std::uint64_t>(earlier.torn_tail().n);
    in_its_segment = in_its_segment && facts.keeps == limits_.keeps;
  }
  if (in_its_segment) {
    open_segment(file, end);
  } else {
    std::filesystem::resize_file(file, end);
  }
}

void OrderLog::open_segment(const std::filesystem::path& file, std::uint64_t end) {
  path_ = file.string();
  descriptor_ =
      fails_at("order_log.open") ? -1 : open(path_.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
  if (descriptor_ < 0 || ftruncate(descriptor_, static_cast<off_t>(end)) != 0 ||
      lseek(descriptor_, 0, SEEK_END) < 0) {
    fail(Exit::busy, "order log {} cannot be written: {}", path_, system_text(errno));
  }
  segment_bytes_ = end;
}

void OrderLog::begin_segment(bool after_damage) {
  if (descriptor_ >= 0) {
    flush();
    close(std::exchange(descriptor_, -1));
  }
  const auto files = segment_files(log_);
  if (limits_.size) {
    prune(files, {limits_.size->n / kSegments}, *limits_.size);
  }
  ++segment_;
  open_segment(files.empty() ? log_ : segment_file(log_, segment_), 0);
  const std::string text =
      with_segment(header_, {.number = segment_,
                             .keeps = limits_.keeps,
                             .carried = static_cast<std::uint32_t>(carried_.size()),
                             .after_damage = after_damage});
  FileHeader header{
      .magic = {}, .version = kVersion, .header_bytes = static_cast<std::uint32_t>(text.size())};
  std::memcpy(header.magic, kMagic, sizeof kMagic);
  append_bytes(pending_, header);
  const auto* bytes = reinterpret_cast<const std::byte*>(text.data());
  pending_.insert(pending_.end(), bytes, bytes + text.size());
  for (const Carried& one : carried_) {
    pending_.insert(pending_.end(), one.record.begin(), one.record.end());
  }
  segment_bytes_ = pending_.size();
  flush();
}

// Keeps the last of each kind that says how later records are to be read.
void OrderLog::carry(messages::Body kind, std::span<const std::byte> record) {
  if (std::ranges::find(kCarriedKinds, kind) != std::end(kCarriedKinds)) {
    std::erase_if(carried_, [&](const Carried& one) { return one.kind == kind; });
    carried_.push_back({kind, {record.begin(), record.end()}});
  }
}

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
  if ((descriptor_ < 0 && !held_) || limits_.keeps == LogKeeps::off) {
    return;
  }
  messages::Body kind = messages::Body::NONE;
  if (is_limited()) {
    const messages::Message* read = message_in(message);
    kind = read != nullptr ? read->body_type() : kind;
    if (!is_kept(kind, limits_.keeps)) {
      return;
    }
    if (kind == messages::Body::Iteration && limits_.size && !held_ &&
        segment_bytes_ >= static_cast<std::uint64_t>(limits_.size->n / kSegments)) {
      begin_segment();
    }
  }
  const std::size_t before = pending_.size();
  append_record(pending_, message, now_ns() - began_ns_);
  segment_bytes_ += pending_.size() - before;
  if (is_limited()) {
    carry(kind, std::span(pending_).subspan(before));
  }
  if (pending_.size() >= kGroup) {
    flush();
  }
}

void OrderLog::flush() {
  if (held_) {
    return;
  }
  const DiskWait waiting;
  std::size_t done = 0;
  while (done < pending_.size()) {
    const ssize_t wrote =
        write_at("order_log.write", descriptor_, pending_.data() + done, pending_.size() - done);
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

OrderLogReader::OrderLogReader(const std::filesystem::path& path, Files which) {
  auto files = which == Files::all_segments ? segment_files(path) : std::vector{path};
  if (files.empty()) {
    files.push_back(path);  // for the reason why it cannot be opened
  }
  if (files.size() > 1 && has_no_header(files.back())) {  // yet
    files.pop_back();
  }
  try {
    for (const std::filesystem::path& file : files) {
      open_segment(file, file == files.back());
    }
    if (which == Files::all_segments) {
      choose_segments();
    }
  } catch (const Failure&) {
    close_all();
    throw;
  }
  rewind();
}

OrderLogReader::~OrderLogReader() { close_all(); }

void OrderLogReader::close_all() {
  for (const Segment& segment : segments_) {
    close(segment.descriptor);
  }
  segments_.clear();
}

void OrderLogReader::open_segment(const std::filesystem::path& path, bool last) {
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) {
    if (errno == ENOENT && (!segments_.empty() || !last)) {
      return;  // pruned meanwhile: the oldest first
    }
    fail("order log {} cannot be read: {}", path.string(), system_text(errno));
  }
  Segment& segment = segments_.emplace_back(Segment{.descriptor = descriptor,
                                                    .path = path.string(),
                                                    .header = {},
                                                    .facts = {},
                                                    .begin = 0,
                                                    .size = 0});
  struct stat status {};
  if (fstat(descriptor, &status) != 0 || !S_ISREG(status.st_mode)) {
    fail("order log {} cannot be read: not a regular file", segment.path);
  }
  segment.size = static_cast<std::uint64_t>(status.st_size);
  FileHeader header{};
  const bool whole = read_at(descriptor, segment.path, 0, &header, sizeof header);
  if (!whole || std::memcmp(header.magic, kMagic, sizeof kMagic) != 0 ||
      header.version != kVersion || header.header_bytes > kMaxHeader ||
      sizeof header + header.header_bytes > segment.size) {
    fail("{} is not an order log of this version of poise", segment.path);
  }
  segment.header.resize(header.header_bytes);
  read_at(descriptor, segment.path, sizeof header, segment.header.data(), segment.header.size());
  segment.begin = sizeof header + header.header_bytes;
  segment.facts = segment_of(segment.header, fmt::format("the header of {}", segment.path));
}

// Of all that are there: those up to the last that keeps something, as far back as none is missing.
void OrderLogReader::choose_segments() {
  const auto keeps_nothing = [](const Segment& one) { return one.facts.keeps == LogKeeps::off; };
  const auto drop = [&](auto first, auto last) {
    std::for_each(first, last, [](const Segment& one) { close(one.descriptor); });
    segments_.erase(first, last);
  };
  const auto end = std::find_if_not(segments_.rbegin(), segments_.rend(), keeps_nothing).base();
  if (end == segments_.begin()) {
    fail("order log {} keeps no orders: the run was started with --orders-log off",
         segments_.front().path);
  }
  extent_.ends_early = end != segments_.end();
  drop(end, segments_.end());
  auto first = segments_.end() - 1;
  while (first != segments_.begin() && !keeps_nothing(*(first - 1)) &&
         (first - 1)->facts.number + 1 == first->facts.number) {
    --first;
  }
  if (first->facts.after_damage) {
    extent_.gap = LogGap::damage;
  } else if (first != segments_.begin() && keeps_nothing(*(first - 1))) {
    extent_.gap = LogGap::off;
  }
  drop(segments_.begin(), first);
  extent_.first_segment = segments_.front().facts.number;
  extent_.segments = static_cast<std::uint32_t>(segments_.size());
  extent_.thin = std::ranges::any_of(
      segments_, [](const Segment& one) { return one.facts.keeps == LogKeeps::tables; });
}

double OrderLogReader::share_read() const {
  std::uint64_t all = 0;
  for (const Segment& segment : segments_) {
    all += segment.size;
  }
  return static_cast<double>(bytes_before_ + offset_) / static_cast<double>(all);
}

void OrderLogReader::rewind() {
  at_ = 0;
  offset_ = segments_.front().begin;
  number_ = in_segment_ = bytes_before_ = 0;
  window_.clear();
  torn_ = {};
}

std::optional<LoggedMessage> OrderLogReader::torn() {
  torn_ = {static_cast<std::int64_t>(segments_[at_].size - offset_)};
  return std::nullopt;
}

bool OrderLogReader::only_nuls_from(std::uint64_t offset) {
  const std::uint64_t size = segments_[at_].size;
  while (offset < size) {
    const auto bytes = view(offset, std::min<std::uint64_t>(kGroup, size - offset));
    if (!is_nul(bytes)) {
      return false;
    }
    offset += bytes.size();
    note_progress();
  }
  return true;
}

std::span<const std::byte> OrderLogReader::view(std::uint64_t offset, std::size_t bytes) {
  const std::uint64_t end = window_offset_ + window_.size();
  if (offset < window_offset_ || offset + bytes > end) {
    const Segment& segment = segments_[at_];
    const std::size_t wanted =
        std::min<std::uint64_t>(std::max(bytes, kGroup), segment.size - offset);
    window_.resize(wanted);
    window_offset_ = offset;
    if (!read_at(segment.descriptor, segment.path, offset, window_.data(), wanted)) {
      fail("order log {} became shorter while it was read", segment.path);
    }
  }
  const std::span<const std::byte> whole = std::span(window_).subspan(offset - window_offset_);
  return whole.first(std::min(bytes, whole.size()));
}

std::optional<LoggedMessage> OrderLogReader::next() {
  for (;;) {
    const Segment& segment = segments_[at_];
    if (offset_ == segment.size && at_ + 1 < segments_.size()) {
      bytes_before_ += segment.size;
      ++at_;
      offset_ = segments_[at_].begin;
      window_.clear();
      in_segment_ = 0;
      continue;
    }
    const bool copied = at_ > 0 && in_segment_ < segment.facts.carried;
    auto record = read_record();
    if (!record && at_ + 1 < segments_.size()) {
      fail("order log {} is damaged: it ends in the middle of a record, and {} goes on",
           segment.path, segments_[at_ + 1].path);
    }
    if (!record || !copied) {
      return record;
    }
  }
}

std::optional<LoggedMessage> OrderLogReader::read_record() {
  const Segment& segment = segments_[at_];
  const std::uint64_t left = segment.size - offset_;
  RecordHeader header{};
  if (left < sizeof header) {
    return torn();
  }
  std::memcpy(&header, view(offset_, sizeof header).data(), sizeof header);
  const bool header_good = header.header_crc == header_crc(header) && header.unused == 0 &&
                           header.payload_bytes <= kMaxMessage.n;
  const auto whole = static_cast<std::uint64_t>(
      round_up(static_cast<std::int64_t>(sizeof header) + header.payload_bytes, 8));
  if (header_good && whole > left) {
    return torn();
  }
  if (header_good) {
    const auto content = view(offset_ + sizeof header, whole - sizeof header);
    const auto payload = content.first(header.payload_bytes);
    if (is_nul(content.subspan(header.payload_bytes)) && crc32c(payload) == header.payload_crc) {
      LoggedMessage record{.number = number_,
                           .time_ns = header.time_ns,
                           .bytes = {payload.begin(), payload.end()},
                           .keeps = segment.facts.keeps};
      offset_ += whole;
      number_ += at_ == 0 || in_segment_ >= segment.facts.carried ? 1 : 0;
      ++in_segment_;
      return record;
    }
    if (whole == left) {  // nothing behind it: the write was cut off
      return torn();
    }
  }
  // The file had its new size, and the power went before the bytes were on the disk.
  const std::uint64_t behind = offset_ + (header_good ? whole : sizeof header);
  const bool none = is_nul(std::as_bytes(std::span(&header, 1)));
  if ((none || behind < segment.size) && only_nuls_from(behind)) {
    return torn();
  }
  fail("order log {} is damaged at record {} (byte {}): what follows cannot be trusted",
       segment.path, number_, offset_);
}

}  // namespace poise
