#pragma once
// What of its run an order log does not have (common/files/order_log_segments.h), in words for its readers.

#include <filesystem>
#include <string>

#include "common/files/order_log_segments.h"

namespace poise {

// "the log begins with segment 7: …"; empty where nothing is missing.
std::string missing_text(const LogExtent& extent);

// Fails unless the log has all that a replay needs; the sentence says what is missing and what to do.
void require_replayable(const LogExtent& extent, const std::filesystem::path& log);

}  // namespace poise
