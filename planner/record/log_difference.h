#pragma once
// `poise inspect --diff`: the first order, table or result in which two order logs differ. Reads both
// from beginning to end at once; what one log has in advance of the other waits, at most 64 MiB of it.
//
// Messages to the executor are compared in their order, and so are those from it. How both kinds lie
// between one another is a matter of time and is not compared.

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <string>

#include "common/files/order_log_segments.h"
#include "planner/record/message_difference.h"

namespace poise {

struct LogDiffOptions {
  std::filesystem::path a, b;
  Compared compared = Compared::work;
  bool json = false;
};

struct LogDifference {
  std::string where;  // "iteration 12, order of layer 3"
  FieldDifference field;
  std::optional<std::uint64_t> iteration;
  std::optional<std::uint64_t> record_a, record_b;  // from 0; nothing: that log has none there
};

struct LogDiffReport {
  std::optional<LogDifference> difference;
  std::uint64_t iterations = 0, records = 0;  // compared and equal
  std::optional<std::uint64_t>
      from;  // the first iteration that both have, if that was not the first of all
  LogExtent extent_a, extent_b;
  std::string build_a, build_b;
};

// Fails if a log cannot be read, or if the logs have no iteration in common.
LogDiffReport diff_logs(const std::filesystem::path& a, const std::filesystem::path& b,
                        Compared compared);
std::string to_text(const LogDiffReport& report, const LogDiffOptions& options);
std::string to_json(const LogDiffReport& report, const LogDiffOptions& options);

}  // namespace poise
