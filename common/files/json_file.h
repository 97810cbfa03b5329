#pragma once
// JSON that others wrote, read strictly and within bounds: depth and size are capped, a name twice
// in one object, invalid UTF-8, lone surrogates, NaN, Infinity, numbers beyond double, comments and
// trailing text are refused; a byte-order mark is accepted. What is wrong is one sentence that
// begins with `what` (a file, "line 17" …; may be empty) and says line and column, or the byte
// where the text is a single line. Pure functions; any thread may call them.

#include <cstdint>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "common/files/regular_file.h"
#include "common/units.h"

namespace poise {

struct JsonLimits {
  Bytes size = kMiB * 256;
  int depth = 64;                 // objects and lists inside one another
  std::int64_t values = 1 << 26;  // of any type, in the whole document: each takes memory
};

nlohmann::json parse_json(std::string_view text, const std::string& what,
                          const JsonLimits& limits = {});
// The document of a file that must be there; its path is the `what`.
nlohmann::json read_json_file(const std::filesystem::path& path, const JsonLimits& limits = {});

// A value as a message shows it: `"12"`, `1.5`, `true`, `a list`, `an object`.
std::string described(const nlohmann::json& value);

// An object's fields, each asked for by name and type. A getter returns nothing where the field is
// absent or null, and fails where it is of another type or out of range: no string, boolean or
// fraction passes for an integer. Holds a reference: the document must outlive it.
class JsonObject {
 public:
  // Fails unless `value` is an object. `what` begins every sentence, as in parse_json.
  JsonObject(const nlohmann::json& value, std::string what);

  struct Integers {
    std::int64_t min = std::numeric_limits<std::int64_t>::min();
    std::int64_t max = std::numeric_limits<std::int64_t>::max();
  };
  struct Numbers {
    double min = std::numeric_limits<double>::lowest();
    double max = std::numeric_limits<double>::max();
  };

  // The field as it stands; nullptr where absent or null.
  const nlohmann::json* find(std::string_view name) const;
  bool has(std::string_view name) const { return find(name) != nullptr; }
  std::optional<std::int64_t> integer(std::string_view name, Integers range) const;  // 8.0 is 8
  std::optional<double> number(std::string_view name, Numbers range) const;
  std::optional<bool> boolean(std::string_view name) const;
  std::optional<std::string> string(std::string_view name) const;
  // A list of integers, or one integer alone.
  std::optional<std::vector<std::int64_t>> integers(std::string_view name, Integers range) const;
  std::optional<JsonObject> object(std::string_view name) const;

  const nlohmann::json& json() const { return *value_; }
  const std::string& what() const { return what_; }
  // `what`, then `name` and the rule it breaks: for fields with rules of their own.
  [[noreturn]] void refuse(std::string_view name, const std::string& rule) const;

 private:
  const nlohmann::json* value_;
  std::string what_;
};

// The integer that `value` is (8.0 is 8, true and "8" are none), if it is one that fits.
std::optional<std::int64_t> as_integer(const nlohmann::json& value);

}  // namespace poise
