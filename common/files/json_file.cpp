#include "common/files/json_file.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "common/trouble.h"

namespace poise {
namespace {

using Json = nlohmann::json;

std::string prefix(const std::string& what) { return what.empty() ? "" : what + ": "; }

// "byte 12", or "line 3, column 4" where there are lines. Counted from 1.
std::string position(std::string_view text, std::size_t byte) {
  const std::string_view before = text.substr(0, std::min(byte, text.size()));
  const auto lines = std::ranges::count(before, '\n');
  if (lines == 0 && text.find('\n') == std::string_view::npos) {
    return fmt::format("byte {}", byte);
  }
  const std::size_t line_start = before.rfind('\n') + 1;  // npos + 1 is 0
  return fmt::format("line {}, column {}", lines + 1, byte - std::min(byte, line_start));
}

// nlohmann's explanation without its error numbers, its idea of the position and its excerpt.
std::string explanation(std::string_view message) {
  if (const auto number = message.find("] "); number != std::string_view::npos) {
    message.remove_prefix(number + 2);
  }
  if (message.starts_with("parse error")) {
    if (const auto colon = message.find(": "); colon != std::string_view::npos) {
      message.remove_prefix(colon + 2);
    }
  }
  const auto excerpt = message.find("; last read: '");
  std::string text(message.substr(0, excerpt));
  if (const auto expected = message.rfind("; expected "); excerpt != std::string_view::npos &&
                                                          expected != std::string_view::npos &&
                                                          expected > excerpt) {
    text += message.substr(expected);
  }
  return shown(text, 200);
}

// Builds the document and holds the rules while it does.
class StrictReader : public nlohmann::json_sax<Json> {
 public:
  StrictReader(std::string_view text, const std::string& what, const JsonLimits& limits)
      : text_(text), what_(what), limits_(limits) {}

  bool null() override { return place(nullptr); }
  bool boolean(bool value) override { return place(value); }
  bool number_integer(number_integer_t value) override { return place(value); }
  bool number_unsigned(number_unsigned_t value) override { return place(value); }
  bool number_float(number_float_t value, const string_t&) override { return place(value); }
  bool string(string_t& value) override { return place(std::move(value)); }
  bool binary(binary_t&) override { return false; }  // not in JSON text

  bool start_object(std::size_t) override { return open(Json::object()); }
  bool start_array(std::size_t) override { return open(Json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }

  bool key(string_t& name) override {
    Json& object = *open_.back();
    const auto [place, fresh] = object.get_ref<Json::object_t&>().try_emplace(std::move(name));
    if (!fresh) {
      fail("{}the name \"{}\" appears twice in one object", prefix(what_), shown(place->first));
    }
    slot_ = &place->second;
    return true;
  }

  bool parse_error(std::size_t byte, const std::string&, const Json::exception& error) override {
    const std::string why = explanation(error.what());
    if (byte > 0 && byte <= text_.size() && text_[byte - 1] == '\0' &&
        why.find("end of input") != std::string::npos) {
      refuse_nul(byte - 1);
    }
    fail("{}not valid JSON at {}: {}", prefix(what_), position(text_, byte), why);
  }
  // nlohmann takes a NUL for the end of its input and would ignore what follows.
  void check_end() const {
    if (const std::size_t nul = text_.find('\0'); nul != std::string_view::npos) {
      refuse_nul(nul);
    }
  }

  Json take() { return std::move(root_); }

 private:
  [[noreturn]] void refuse_nul(std::size_t at) const {
    fail("{}not valid JSON at {}: a NUL byte", prefix(what_), position(text_, at + 1));
  }
  Json* put(Json value) {
    if (++values_ > limits_.values) {
      fail("{}more than {} values in one document", prefix(what_), limits_.values);
    }
    if (open_.empty()) {
      root_ = std::move(value);
      return &root_;
    }
    if (Json& parent = *open_.back(); parent.is_array()) {
      parent.push_back(std::move(value));
      return &parent.back();
    }
    *slot_ = std::move(value);
    return slot_;
  }
  bool place(Json value) {
    put(std::move(value));
    return true;
  }
  // The parents of an open value do not change while it is open, so that pointers into them hold.
  bool open(Json value) {
    if (static_cast<int>(open_.size()) >= limits_.depth) {
      fail("{}lists and objects lie more than {} deep in one another", prefix(what_),
           limits_.depth);
    }
    open_.push_back(put(std::move(value)));
    return true;
  }
  bool close() {
    open_.pop_back();
    return true;
  }

  std::string_view text_;
  const std::string& what_;
  const JsonLimits& limits_;
  Json root_;
  std::vector<Json*> open_;
  std::int64_t values_ = 0;
  Json* slot_ = nullptr;  // where the value of the last name goes
};

std::string range_text(JsonObject::Integers range) {
  constexpr JsonObject::Integers kAll;
  if (range.min == kAll.min && range.max == kAll.max) {
    return "an integer";
  }
  if (range.max == kAll.max) {
    return fmt::format("an integer of at least {}", range.min);
  }
  return fmt::format("an integer from {} to {}", range.min, range.max);
}

std::string range_text(JsonObject::Numbers range) {
  constexpr JsonObject::Numbers kAll;
  if (range.min == kAll.min && range.max == kAll.max) {
    return "a number";
  }
  if (range.max == kAll.max) {
    return fmt::format("a number of at least {}", range.min);
  }
  return fmt::format("a number from {} to {}", range.min, range.max);
}

}  // namespace

nlohmann::json parse_json(std::string_view text, const std::string& what,
                          const JsonLimits& limits) {
  if (text.size() > static_cast<std::uint64_t>(limits.size.n)) {
    fail("{}{} bytes of JSON; at most {} are read", prefix(what), text.size(), limits.size.n);
  }
  StrictReader reader(text, what, limits);
  const bool complete = Json::sax_parse(text.begin(), text.end(), &reader);
  check(complete, "a JSON text is read to its end, or a sentence was thrown");
  reader.check_end();
  return reader.take();
}

nlohmann::json read_json_file(const std::filesystem::path& path, const JsonLimits& limits) {
  return parse_json(read_text_file(path, limits.size), shown(path.string(), 300), limits);
}

std::string described(const nlohmann::json& value) {
  switch (value.type()) {
    case Json::value_t::object:
      return "an object";
    case Json::value_t::array:
      return "a list";
    case Json::value_t::string:
      return '"' + shown(value.get_ref<const std::string&>(), 40) + '"';
    default:
      return value.dump();
  }
}

std::optional<std::int64_t> as_integer(const nlohmann::json& value) {
  constexpr std::int64_t kLargest = std::numeric_limits<std::int64_t>::max();
  if (value.is_number_unsigned()) {
    const auto number = value.get<std::uint64_t>();
    return number <= static_cast<std::uint64_t>(kLargest)
               ? std::optional(static_cast<std::int64_t>(number))
               : std::nullopt;
  }
  if (value.is_number_integer()) {
    return value.get<std::int64_t>();
  }
  if (value.is_number_float()) {
    const auto number = value.get<double>();
    if (std::trunc(number) == number && std::abs(number) < 0x1p63) {
      return static_cast<std::int64_t>(number);
    }
  }
  return std::nullopt;
}

JsonObject::JsonObject(const nlohmann::json& value, std::string what)
    : value_(&value), what_(std::move(what)) {
  if (!value.is_object()) {
    fail("{}a JSON object is needed, not {}", prefix(what_), described(value));
  }
}

const nlohmann::json* JsonObject::find(std::string_view name) const {
  const auto field = value_->find(name);
  return field == value_->end() || field->is_null() ? nullptr : &*field;
}

void JsonObject::refuse(std::string_view name, const std::string& rule) const {
  fail("{}\"{}\" {}", prefix(what_), shown(name, 100), shown(rule, 1000));
}

std::optional<std::int64_t> JsonObject::integer(std::string_view name, Integers range) const {
  const Json* field = find(name);
  if (field == nullptr) {
    return std::nullopt;
  }
  const auto number = as_integer(*field);
  if (!number || *number < range.min || *number > range.max) {
    refuse(name, fmt::format("must be {}, not {}", range_text(range), described(*field)));
  }
  return number;
}

std::optional<double> JsonObject::number(std::string_view name, Numbers range) const {
  const Json* field = find(name);
  if (field == nullptr) {
    return std::nullopt;
  }
  const double number = field->is_number() ? field->get<double>() : 0;
  if (!field->is_number() || !(number >= range.min && number <= range.max)) {
    refuse(name, fmt::format("must be {}, not {}", range_text(range), described(*field)));
  }
  return number;
}

std::optional<bool> JsonObject::boolean(std::string_view name) const {
  const Json* field = find(name);
  if (field == nullptr) {
    return std::nullopt;
  }
  if (!field->is_boolean()) {
    refuse(name, fmt::format("must be true or false, not {}", described(*field)));
  }
  return field->get<bool>();
}

std::optional<std::string> JsonObject::string(std::string_view name) const {
  const Json* field = find(name);
  if (field == nullptr) {
    return std::nullopt;
  }
  if (!field->is_string()) {
    refuse(name, fmt::format("must be a string, not {}", described(*field)));
  }
  return field->get<std::string>();
}

std::optional<std::vector<std::int64_t>> JsonObject::integers(std::string_view name,
                                                              Integers range) const {
  const Json* field = find(name);
  if (field == nullptr) {
    return std::nullopt;
  }
  if (!field->is_array()) {
    return std::vector{*integer(name, range)};
  }
  std::vector<std::int64_t> numbers;
  for (const Json& element : *field) {
    const auto number = as_integer(element);
    if (!number || *number < range.min || *number > range.max) {
      refuse(name, fmt::format("must be {} or a list of such, not a list with {}",
                               range_text(range), described(element)));
    }
    numbers.push_back(*number);
  }
  return numbers;
}

std::optional<JsonObject> JsonObject::object(std::string_view name) const {
  const Json* field = find(name);
  if (field == nullptr) {
    return std::nullopt;
  }
  if (!field->is_object()) {
    refuse(name, fmt::format("must be an object, not {}", described(*field)));
  }
  return JsonObject(*field, fmt::format("{}in \"{}\"", prefix(what_), shown(name, 100)));
}

}  // namespace poise
