// What most sources include. It is compiled once and given to the sources of most libraries and tests (poise_precompile in the
// top CMakeLists.txt); nothing includes it.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <charconv>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <random>
#include <set>
#include <span>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include <fmt/format.h>
#ifdef GTEST_HAS_PTHREAD  // where GoogleTest is linked
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#endif
#include <nlohmann/json.hpp>
#include <spdlog/spdlog.h>

#include "common/messages_generated.h"

#ifdef POISE_INSTANTIATE  // templates that many sources use
#define POISE_INSTANTIATED
template class nlohmann::basic_json<>;
template class nlohmann::basic_json<nlohmann::ordered_map>;
template class std::map<std::string, nlohmann::json, std::less<>>;
template class std::vector<nlohmann::json>;
template class std::vector<nlohmann::ordered_json>;
template class std::vector<std::string>;
template class std::vector<std::byte>;
template class std::vector<std::uint8_t>;
template class std::vector<std::int32_t>;
template class std::vector<std::int64_t>;
template class std::vector<std::uint32_t>;
template class std::vector<std::uint64_t>;
template class std::vector<float>;
template void fmt::detail::vformat_to<char>(fmt::detail::buffer<char>&, fmt::string_view, fmt::format_args,
                                            fmt::detail::locale_ref);
#endif
