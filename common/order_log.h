#pragma once
// A log of every message as it was sent, each with its CRC. The planner writes it; `poise inspect`
// and replay read it. A torn tail (a process was killed in the middle of a write, or a power loss
// left nothing but NUL bytes behind the last record) is accepted: the reader stops before it and
// says how many bytes it did not read. Damage anywhere else fails with record number and offset; no
// record is skipped silently.
//
//   file:   | magic "POISELOG" | version u32 | header bytes u32 | header, JSON (run, model, build) | records …
//   record: | payload bytes u32 | crc32c of payload u32 | ns since the log began u64 | crc32c of these u32 | 0 u32
//           | payload: one Message | padding to 8 |
//
// A log may be several files (common/files/order_log_segments.h); reader and writer are given the first one's name.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "common/files/order_log_segments.h"
#include "common/units.h"

namespace poise {

std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t before = 0);

class OrderLog {
 public:
  // Creates a log (0600) or continues one, after it cuts off an earlier process's torn tail. What was
  // kept otherwise before, or comes `after_damage`, goes on in a segment of its own.
  OrderLog(const std::filesystem::path& path, const std::string& header_json,
           const OrderLogLimits& limits = {}, bool after_damage = false);
  // Keeps nothing: for orders that are recorded already.
  OrderLog();
  // A log that holds its records in memory until `begin` gives them a file.
  static std::unique_ptr<OrderLog> held(const std::string& header_json,
                                        const OrderLogLimits& limits);
  ~OrderLog();
  OrderLog(const OrderLog&) = delete;
  OrderLog& operator=(const OrderLog&) = delete;

  // Creates the log and writes what was held. REQUIRES: records are held, and there is no log of this name.
  void begin(const std::filesystem::path& path);
  // Buffers records in groups of at most 1 MiB; `flush` writes what is buffered.
  void append(std::span<const std::byte> message);
  void flush();
  // CLOCK_MONOTONIC at the records' time 0.
  std::uint64_t began_ns() const { return began_ns_; }

 private:
  struct Carried {  // a record as it stands, of which a new segment has a copy
    messages::Body kind;
    std::vector<std::byte> record;
  };

  void go_on(const std::filesystem::path& file, bool in_its_segment);
  void open_segment(const std::filesystem::path& file, std::uint64_t end);
  void begin_segment(bool after_damage = false);
  void carry(messages::Body kind, std::span<const std::byte> record);
  bool is_limited() const { return limits_.size || limits_.keeps != LogKeeps::full; }

  int descriptor_ = -1;
  bool held_ = false;  // no file yet: records wait in pending_
  std::filesystem::path log_;
  std::string path_;  // of the segment
  std::string header_;
  OrderLogLimits limits_;
  std::uint32_t segment_ = 0;  // its number; 0: none yet
  std::uint64_t segment_bytes_ = 0;
  std::vector<Carried> carried_;  // in the order in which they were sent
  std::vector<std::byte> pending_;
  std::uint64_t began_ns_ = 0;
};

struct LoggedMessage {
  std::uint64_t number;  // from 0
  std::uint64_t time_ns;
  std::vector<std::byte> bytes;
  LogKeeps keeps = LogKeeps::full;  // its segment
};

// Reads the segments that are there without a gap up to the last that keeps something.
class OrderLogReader {
 public:
  enum class Files { all_segments, one_alone };
  explicit OrderLogReader(const std::filesystem::path& path, Files files = Files::all_segments);
  ~OrderLogReader();
  OrderLogReader(const OrderLogReader&) = delete;
  OrderLogReader& operator=(const OrderLogReader&) = delete;

  const std::string& header_json() const { return segments_.front().header; }
  const LogExtent& extent() const { return extent_; }
  // What is appended to the files after they were opened is not read.
  std::optional<LoggedMessage> next();       // nothing: the end, or a torn tail
  void rewind();                             // to the first record
  Bytes torn_tail() const { return torn_; }  // valid once next() returned nothing
  double share_read() const;

 private:
  struct Segment {
    int descriptor;
    std::string path;
    std::string header;
    SegmentFacts facts;
    std::uint64_t begin, size;  // of its records; of the file
  };

  void open_segment(const std::filesystem::path& path, bool last);
  void close_all();
  void choose_segments();
  std::optional<LoggedMessage> read_record();
  std::optional<LoggedMessage> torn();  // ends the reading here
  bool only_nuls_from(std::uint64_t offset);
  // `bytes` of the segment from `offset` on, or fewer at its end; valid until the next call.
  std::span<const std::byte> view(std::uint64_t offset, std::size_t bytes);

  std::vector<Segment> segments_;
  LogExtent extent_;
  std::size_t at_ = 0;  // the segment that is read
  std::uint64_t offset_ = 0, number_ = 0, in_segment_ = 0;
  std::uint64_t bytes_before_ = 0;  // of the segments before it
  std::vector<std::byte> window_;   // the bytes of the file from window_offset_ on
  std::uint64_t window_offset_ = 0;
  Bytes torn_{};
};

}  // namespace poise
