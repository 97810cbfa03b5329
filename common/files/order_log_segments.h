#pragma once
// The files of one order log. Its first segment has the log's own name, each later one a number behind
// it: orders.log, orders.log.2, orders.log.3 … A segment begins between two iterations. Its header says
// its number, what it keeps, and how many of its first records are copies of earlier ones (the pool, the
// Configure in force …): they make it readable alone. A log with a size limit loses its oldest segments.
// No file is renamed, so a reader of a log that grows finds each segment under one name. Here: the limits,
// what each keeps, and the files. OrderLog (common/order_log.cpp) decides when a segment begins and which
// records it carries.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/messages_generated.h"
#include "common/units.h"

namespace poise {

// What a log keeps. Tables: everything but the orders of single layers and the reports on them, which
// are half of a log's bytes.
enum class LogKeeps : std::uint8_t { off, tables, full };
std::string_view name_of(LogKeeps keeps);
std::optional<LogKeeps> log_keeps_from(std::string_view name);
bool is_kept(messages::Body kind, LogKeeps keeps);

inline constexpr Bytes kMinLogSize = kKiB * 64;
struct OrderLogLimits {
  LogKeeps keeps = LogKeeps::full;
  std::optional<Bytes> size;  // of all segments, one iteration more or less; nothing: no limit
};
// A limited log has about this many segments.
inline constexpr std::int64_t kSegments = 8;

struct SegmentFacts {
  std::uint32_t number = 1;
  LogKeeps keeps = LogKeeps::full;
  std::uint32_t carried = 0;  // records at its beginning that are copies
  bool after_damage = false;  // the one before it was damaged and set aside
};
// `header`, a JSON object, with these facts. Those of a whole log go without saying.
std::string with_segment(const std::string& header, const SegmentFacts& facts);
// Fails if `header` is no JSON object with such facts. `what` begins the sentence.
SegmentFacts segment_of(const std::string& header, const std::string& what);

// The segments that are there, by number; the log's own name is the first.
std::vector<std::filesystem::path> segment_files(const std::filesystem::path& log);
std::filesystem::path segment_file(const std::filesystem::path& log, std::uint32_t number);
void remove_log(const std::filesystem::path& log);
// Removes the oldest of `closed`, until with `room` more bytes all of them are no larger than `size`.
void prune(const std::vector<std::filesystem::path>& closed, Bytes room, Bytes size);

// Why a log begins with a later segment than its first.
enum class LogGap : std::uint8_t {
  removed,  // earlier ones are not there: --orders-log-size removed them
  off,      // the one before it keeps nothing
  damage,   // the one before it was damaged and set aside
};

// What a reader has of a log.
struct LogExtent {
  std::uint32_t first_segment = 1;  // above 1: earlier ones are not there …
  LogGap gap = LogGap::removed;     // … for this reason
  std::uint32_t segments = 1;
  bool thin = false;        // some keep tables alone
  bool ends_early = false;  // the last ones keep nothing

  bool begins_late() const { return first_segment > 1; }
};

}  // namespace poise
