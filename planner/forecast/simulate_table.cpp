#include "planner/forecast/simulate_table.h"

#include <fmt/core.h>

#include <algorithm>
#include <iterator>
#include <vector>

namespace poise {
namespace {

constexpr std::size_t kNarrowest = 13;  // so that tables look alike

std::string cell(const nlohmann::ordered_json& value) {
  return value.is_number_float() ? fmt::format("{:.2f}", value.get<double>())
         : value.is_string()     ? value.get<std::string>()
                                 : value.dump();
}

}  // namespace

std::string to_table(const nlohmann::ordered_json& played) {
  std::vector<std::vector<std::string>> lines(1);
  for (const auto& [name, value] : played["rows"].front().items()) {
    lines.front().push_back(name);
  }
  for (const auto& row : played["rows"]) {
    lines.emplace_back();
    for (const auto& [name, value] : row.items()) {
      lines.back().push_back(cell(value));
    }
  }
  std::vector<std::size_t> widths(lines.front().size(), kNarrowest);
  for (const auto& line : lines) {
    for (std::size_t i = 0; i < line.size(); ++i) {
      widths[i] = std::max(widths[i], line[i].size());
    }
  }
  std::string text;
  for (const auto& line : lines) {
    for (std::size_t i = 0; i + 1 < line.size(); ++i) {
      fmt::format_to(std::back_inserter(text), "{:<{}}  ", line[i], widths[i]);
    }
    text += line.back() + '\n';
  }
  if (played.contains("notes")) {
    for (const auto& note : played["notes"]) {
      text += note.get<std::string>() + '\n';
    }
  }
  return text;
}

}  // namespace poise
