#pragma once
// A log of every message as it was sent, each with its CRC. The planner writes it; `poise inspect`
// and replay read it. A torn tail (a process was killed in the middle of a write) is accepted: the
// reader stops before it and says how many bytes it did not read. Damage anywhere else fails with
// record number and offset; no record is skipped silently.
//
//   file:   | magic "POISELOG" | version u32 | header bytes u32 | header, JSON (run, model, build) | records …
//   record: | payload bytes u32 | crc32c of payload u32 | ns since the log began u64 | crc32c of these u32 | 0 u32
//           | payload: one Message | padding to 8 |

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "common/units.h"

namespace poise {

std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t before = 0);

class OrderLog {
 public:
  // Creates a log (0600) or continues one, after it cuts off an earlier process's torn tail.
  OrderLog(const std::filesystem::path& path, const std::string& header_json);
  // Keeps nothing: for orders that are recorded already.
  OrderLog();
  ~OrderLog();
  OrderLog(const OrderLog&) = delete;
  OrderLog& operator=(const OrderLog&) = delete;

  // Buffers records in groups of at most 1 MiB; `flush` writes what is buffered.
  void append(std::span<const std::byte> message);
  void flush();
  // CLOCK_MONOTONIC at the records' time 0.
  std::uint64_t began_ns() const { return began_ns_; }

 private:
  int descriptor_ = -1;
  std::string path_;
  std::vector<std::byte> pending_;
  std::uint64_t began_ns_ = 0;
};

struct LoggedMessage {
  std::uint64_t number;  // from 0
  std::uint64_t time_ns;
  std::vector<std::byte> bytes;
};

class OrderLogReader {
 public:
  explicit OrderLogReader(const std::filesystem::path& path);
  ~OrderLogReader();
  OrderLogReader(const OrderLogReader&) = delete;
  OrderLogReader& operator=(const OrderLogReader&) = delete;

  const std::string& header_json() const { return header_; }
  // What is appended to the file after it was opened is not read.
  std::optional<LoggedMessage> next();       // nothing: the end, or a torn tail
  void rewind();                             // to the first record
  Bytes torn_tail() const { return torn_; }  // valid once next() returned nothing
  double share_read() const { return static_cast<double>(offset_) / static_cast<double>(size_); }

 private:
  std::optional<LoggedMessage> torn();  // ends the reading here

  int descriptor_ = -1;
  std::string path_;
  std::string header_;
  std::uint64_t offset_ = 0, size_ = 0, number_ = 0;
  Bytes torn_{};
};

}  // namespace poise
