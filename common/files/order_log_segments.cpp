#include "common/files/order_log_segments.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <system_error>
#include <utility>

#include "common/files/json.h"
#include "common/files/json_file.h"
#include "common/trouble.h"

namespace poise {
namespace {

constexpr std::array<std::string_view, 3> kKeepsNames{"off", "tables", "full"};

// Of `orders.log.7`: 7; nothing for other names.
std::optional<std::uint32_t> number_behind(const std::string& log, const std::string& name) {
  std::uint32_t number = 0;
  if (name.size() < log.size() + 2 || !name.starts_with(log) || name[log.size()] != '.') {
    return std::nullopt;
  }
  const char* begin = name.data() + log.size() + 1;
  const char* end = name.data() + name.size();
  const auto [rest, error] = std::from_chars(begin, end, number);
  return error == std::errc{} && rest == end && *begin != '0' ? std::optional(number)
                                                              : std::nullopt;
}

}  // namespace

std::string_view name_of(LogKeeps keeps) { return kKeepsNames.at(static_cast<std::size_t>(keeps)); }

std::optional<LogKeeps> log_keeps_from(std::string_view name) {
  const auto found = std::ranges::find(kKeepsNames, name);
  return found == kKeepsNames.end()
             ? std::nullopt
             : std::optional(static_cast<LogKeeps>(found - kKeepsNames.begin()));
}

bool is_kept(messages::Body kind, LogKeeps keeps) {
  const bool of_a_layer = kind == messages::Body::LayerOrder || kind == messages::Body::LayerDone;
  return keeps == LogKeeps::full || (keeps == LogKeeps::tables && !of_a_layer);
}

std::string with_segment(const std::string& header, const SegmentFacts& facts) {
  if (facts.number == 1 && facts.keeps == LogKeeps::full && facts.carried == 0 &&
      !facts.after_damage) {
    return header;
  }
  auto json = nlohmann::ordered_json::parse(header);
  json["segment"] = facts.number;
  json["keeps"] = std::string(name_of(facts.keeps));
  json["carried"] = facts.carried;
  if (facts.after_damage) {
    json["after_damage"] = true;
  }
  return json.dump();
}

SegmentFacts segment_of(const std::string& header, const std::string& what) {
  const nlohmann::json json = parse_json(header, what);
  const JsonObject object(json, what);
  SegmentFacts facts;
  facts.number = static_cast<std::uint32_t>(
      object.integer("segment", {.min = 1, .max = INT32_MAX}).value_or(1));
  facts.carried =
      static_cast<std::uint32_t>(object.integer("carried", {.min = 0, .max = 64}).value_or(0));
  facts.after_damage = object.boolean("after_damage").value_or(false);
  if (const auto keeps = object.string("keeps")) {
    const auto known = log_keeps_from(*keeps);
    if (!known) {
      object.refuse("keeps", fmt::format("is '{}', which this version does not know", *keeps));
    }
    facts.keeps = *known;
  }
  return facts;
}

std::vector<std::filesystem::path> segment_files(const std::filesystem::path& log) {
  std::vector<std::pair<std::uint32_t, std::filesystem::path>> found;
  std::error_code error;
  if (std::filesystem::exists(log, error)) {
    found.emplace_back(0, log);
  }
  const std::filesystem::path folder = log.has_parent_path() ? log.parent_path() : ".";
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    if (const auto number = number_behind(log.filename().string(), name)) {
      found.emplace_back(*number, log.parent_path() / name);
    }
  }
  std::ranges::sort(found);
  std::vector<std::filesystem::path> files;
  for (auto& [number, path] : found) {
    files.push_back(std::move(path));
  }
  return files;
}

std::filesystem::path segment_file(const std::filesystem::path& log, std::uint32_t number) {
  std::filesystem::path path = log;
  path += fmt::format(".{}", number);
  return path;
}

void remove_log(const std::filesystem::path& log) {
  for (const std::filesystem::path& file : segment_files(log)) {
    std::filesystem::remove(file);
  }
}

void prune(const std::vector<std::filesystem::path>& closed, Bytes room, Bytes size) {
  std::uint64_t all = static_cast<std::uint64_t>(room.n);
  std::vector<std::uint64_t> bytes;
  for (const std::filesystem::path& file : closed) {
    std::error_code error;
    const auto one = std::filesystem::file_size(file, error);
    bytes.push_back(error ? 0 : one);
    all += bytes.back();
  }
  for (std::size_t i = 0; i < closed.size() && all > static_cast<std::uint64_t>(size.n); ++i) {
    std::error_code error;  // what cannot be removed is tried again with the next segment
    std::filesystem::remove(closed[i], error);
    all -= bytes[i];
  }
}

}  // namespace poise
