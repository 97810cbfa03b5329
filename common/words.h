#pragma once
// Numbers and sizes as text for messages. launch/supervisor/shared/quantities.py writes them the same
// way.

#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>

#include "common/units.h"

namespace poise {

// "1 request", "2 requests", "0 mini-batches", "3 entries".
std::string counted_noun(std::int64_t number, std::string_view noun);
std::string counted(std::integral auto number, std::string_view noun) {
  return counted_noun(static_cast<std::int64_t>(number), noun);
}
// "2.3 GiB", "24.0 KiB", "12 bytes": in the largest unit that gives at least 1.
std::string size_text(Bytes size);

}  // namespace poise
