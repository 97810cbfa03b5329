#pragma once
// Reads JSON from outside strictly and within bounds. Depth and size are capped. It refuses a name
// twice in one object, invalid UTF-8, lone surrogates, NaN, Infinity, numbers beyond double, comments
// and trailing text; it accepts a byte-order mark. An error is one sentence that begins with `what`
// (a file, "line 17" …; may be empty) and gives line and column, or the byte if the text is a single
// line. Pure functions; any thread may call them.

#include <cstdint>
#include <filesystem>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/files/json.h"
#include "common/files/regular_file.h"
#include "common/units.h"

namespace poise {

struct JsonLimits {
  Bytes size = kMiB * 256;
  int depth = 64;                 // objects and lists inside one another
  std::int64_t values = 1 << 26;  // of any type, in the whole document
};

nlohmann::json parse_json(std::string_view text, const std::string& what,
                          const JsonLimits& limits = {});
// The document in a file, which must exist; the file's path is the `what`.
nlohmann::json read_json_file(const std::filesystem::path& path, const JsonLimits& limits = {});

// A value as a message shows it: `"12"`, `1.5`, `true`, `a list`, `an object`.
std::string described(const nlohmann::json& value);

// An object's fields, each read by name and type. A getter returns nothing if the field is absent or
// null, and fails if it has another type or is out of range: a string, a boolean or a fraction is no
// integer. Holds a reference: the document must outlive it.
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

  // The field itself; nullptr if absent or null.
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
  // Fails with `what`, `name` and `rule`: for fields with rules of their own.
  [[noreturn]] void refuse(std::string_view name, const std::string& rule) const;

 private:
  const nlohmann::json* value_;
  std::string what_;
};

// `value` as an integer (8.0 is 8; true and "8" are none); nothing if it is none or does not fit.
std::optional<std::int64_t> as_integer(const nlohmann::json& value);

}  // namespace poise
