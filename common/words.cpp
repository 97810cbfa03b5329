#include "common/words.h"

#include <fmt/core.h>

#include <array>
#include <utility>

namespace poise {

std::string counted_noun(std::int64_t number, std::string_view noun) {
  if (number != 1 && noun.ends_with("ry")) {
    return fmt::format("{} {}ies", number, noun.substr(0, noun.size() - 1));
  }
  return fmt::format("{} {}{}", number, noun, number == 1 ? "" : noun.ends_with("ch") ? "es" : "s");
}

std::string size_text(Bytes size) {
  constexpr std::array<std::pair<Bytes, const char*>, 4> kUnits{
      {{kGiB * 1024, "TiB"}, {kGiB, "GiB"}, {kMiB, "MiB"}, {kKiB, "KiB"}}};
  for (const auto& [unit, name] : kUnits) {
    if (size >= unit) {
      return fmt::format("{:.1f} {}", static_cast<double>(size.n) / static_cast<double>(unit.n),
                         name);
    }
  }
  return counted(size.n, "byte");
}

}  // namespace poise
