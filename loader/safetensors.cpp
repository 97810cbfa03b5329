#include "loader/safetensors.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <optional>
#include <span>
#include <utility>

#include "common/files/json.h"
#include "common/files/json_file.h"
#include "common/trouble.h"
#include "common/words.h"

namespace poise {
namespace {

constexpr std::size_t kMaxRank = 8;
// An entry is an object of a string, a list of sizes and a list of two offsets.
constexpr std::int64_t kMaxValues = kMaxTensors * (5 + static_cast<std::int64_t>(kMaxRank));

constexpr std::array<std::pair<std::string_view, int>, 22> kBits{{
    {"F32", 32},        {"F16", 16},        {"BF16", 16},   {"F64", 64},    {"I64", 64},
    {"I32", 32},        {"I16", 16},        {"I8", 8},      {"U64", 64},    {"U32", 32},
    {"U16", 16},        {"U8", 8},          {"BOOL", 8},    {"C64", 64},    {"F8_E4M3", 8},
    {"F8_E5M2", 8},     {"F8_E8M0", 8},     {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"F4", 4},
    {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8},
}};

// One entry of the header, with the sentence's beginning at hand.
class Entry {
 public:
  Entry(const std::string& what, const std::string& name, const nlohmann::json& json)
      : what_(what), name_(name), json_(json) {
    if (!json.is_object()) {
      refuse(fmt::format("must be described by an object, not {}", described(json)));
    }
    for (const auto& [field, value] : json.items()) {
      if (field != "dtype" && field != "shape" && field != "data_offsets") {
        refuse(fmt::format("has the unknown field \"{}\"", shown(field)));
      }
    }
  }

  std::string dtype() const {
    const nlohmann::json& value = field("dtype");
    if (!value.is_string()) {
      refuse("has a \"dtype\" that is no string");
    }
    return value.get<std::string>();
  }

  std::vector<std::int64_t> shape() const {
    const nlohmann::json& value = field("shape");
    if (!value.is_array() || value.size() > kMaxRank) {
      refuse(fmt::format("has a \"shape\" that is no list of at most {} sizes", kMaxRank));
    }
    std::vector<std::int64_t> shape;
    for (const nlohmann::json& size : value) {
      shape.push_back(static_cast<std::int64_t>(number(size, "shape")));
    }
    return shape;
  }

  std::pair<std::uint64_t, std::uint64_t> offsets() const {
    const nlohmann::json& value = field("data_offsets");
    if (!value.is_array() || value.size() != 2) {
      refuse("has \"data_offsets\" that are no list of two numbers");
    }
    const std::uint64_t begin = number(value[0], "data_offsets");
    const std::uint64_t end = number(value[1], "data_offsets");
    if (end < begin) {
      refuse(fmt::format("has \"data_offsets\" that run backwards: {} to {}", begin, end));
    }
    return {begin, end};
  }

  [[noreturn]] void refuse(const std::string& rule) const {
    fail("{}: tensor {} {}", what_, shown(name_), rule);
  }

 private:
  const nlohmann::json& field(const char* name) const {
    const auto found = json_.find(name);
    if (found == json_.end()) {
      refuse(fmt::format("has no \"{}\"", name));
    }
    return *found;
  }

  // Only digits make a size or an offset: no 1.0, 1e0 or -0.
  std::uint64_t number(const nlohmann::json& value, const char* field) const {
    if (!value.is_number_unsigned() || value.get<std::uint64_t>() >> 62 != 0) {
      refuse(fmt::format("has {} in \"{}\", which is no size", described(value), field));
    }
    return value.get<std::uint64_t>();
  }

  const std::string& what_;
  const std::string& name_;
  const nlohmann::json& json_;
};

// Bytes of a tensor; nothing where they do not fit 62 bits or do not end at a byte.
std::optional<std::uint64_t> bytes_of(const std::vector<std::int64_t>& shape, int bits) {
  auto total = static_cast<std::uint64_t>(bits);
  for (const std::int64_t size : shape) {
    if (__builtin_mul_overflow(total, static_cast<std::uint64_t>(size), &total)) {
      return std::nullopt;
    }
  }
  return total % 8 == 0 ? std::optional(total / 8) : std::nullopt;
}

StoredTensor read_entry(const Entry& entry, const std::string& name, std::uint64_t data_begin) {
  StoredTensor tensor{.name = name, .dtype = entry.dtype(), .shape = entry.shape()};
  const auto* type =
      std::ranges::find(kBits, tensor.dtype, &std::pair<std::string_view, int>::first);
  if (type == kBits.end()) {
    entry.refuse(fmt::format("has the unknown dtype \"{}\"", shown(tensor.dtype)));
  }
  const auto [begin, end] = entry.offsets();
  const auto expected = bytes_of(tensor.shape, type->second);
  if (!expected || *expected != end - begin) {
    entry.refuse(fmt::format("of shape {} and dtype {} does not take the {} bytes given to it",
                             shape_text(tensor.shape), tensor.dtype, end - begin));
  }
  tensor.begin = data_begin + begin;
  tensor.bytes = {static_cast<std::int64_t>(end - begin)};
  return tensor;
}

// Every byte from the header to the end of the file belongs to one tensor.
void check_coverage(const std::vector<StoredTensor>& tensors, std::uint64_t data_begin,
                    std::uint64_t file_bytes, const std::string& what) {
  std::uint64_t covered = data_begin;
  for (const StoredTensor& tensor : tensors) {
    if (tensor.begin != covered) {
      fail("{}: tensor {} {} (it begins at byte {}, {} was expected)", what, shown(tensor.name),
           tensor.begin < covered ? "overlaps the one before it" : "leaves a hole before it",
           tensor.begin, covered);
    }
    covered += static_cast<std::uint64_t>(tensor.bytes.n);
  }
  if (covered > file_bytes) {
    fail("{}: is cut short: its tensors end at byte {}, the file at {}; fetch it again", what,
         covered, file_bytes);
  }
  if (covered < file_bytes) {
    fail("{}: {} after its last tensor where none should be", what,
         counted(file_bytes - covered, "byte"));
  }
}

void check_metadata(const nlohmann::json& metadata, const std::string& what) {
  if (!metadata.is_object()) {
    fail("{}: \"__metadata__\" must be an object, not {}", what, described(metadata));
  }
  for (const auto& [key, value] : metadata.items()) {
    if (!value.is_string()) {
      fail("{}: \"__metadata__\" must hold strings, but \"{}\" is {}", what, shown(key),
           described(value));
    }
  }
}

std::string read_header(const RegularFile& file, const std::string& what) {
  const auto size = static_cast<std::uint64_t>(file.size().n);
  std::uint64_t length = 0;
  if (size < sizeof length) {
    fail("{}: {} {} no safetensors file: it begins with 8 bytes for the header's length", what,
         counted(size, "byte"), size == 1 ? "is" : "are");
  }
  static_assert(std::endian::native == std::endian::little);
  file.read_exactly(0, std::as_writable_bytes(std::span(&length, 1)));
  if (length > static_cast<std::uint64_t>(kMaxSafetensorsHeader.n)) {
    fail("{}: a header of {} bytes is announced, at most {} are allowed: is it a safetensors file?",
         what, length, kMaxSafetensorsHeader.n);
  }
  if (length > size - sizeof length) {
    fail("{}: is cut short: a header of {} is announced, the file has {}; fetch it again", what,
         counted(length, "byte"), size);
  }
  std::string header(static_cast<std::size_t>(length), '\0');
  file.read_exactly(sizeof length, std::as_writable_bytes(std::span(header)));
  return header;
}

}  // namespace

std::string shape_text(const std::vector<std::int64_t>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

std::vector<StoredTensor> parse_safetensors_header(std::string_view header,
                                                   std::uint64_t data_begin,
                                                   std::uint64_t file_bytes,
                                                   const std::string& what) {
  if (!header.starts_with('{')) {
    fail("{}: the header does not begin with {{: is it a safetensors file?", what);
  }
  header = header.substr(0, header.find_last_not_of(' ') + 1);
  if (!header.ends_with('}')) {
    fail("{}: the header does not end with }}, padded with spaces", what);
  }
  const nlohmann::json document = parse_json(
      header, what + ": header", {.size = kMaxSafetensorsHeader, .depth = 3, .values = kMaxValues});
  std::vector<StoredTensor> tensors;
  for (const auto& [name, value] : document.items()) {
    if (name == "__metadata__") {
      check_metadata(value, what);
    } else {
      tensors.push_back(read_entry(Entry(what, name, value), name, data_begin));
    }
  }
  if (tensors.size() > kMaxTensors) {
    fail("{}: {} tensors in one file; at most {} are read", what, tensors.size(), kMaxTensors);
  }
  // Tensors of no bytes may stand where the next one begins.
  std::ranges::stable_sort(tensors, {}, [](const StoredTensor& tensor) {
    return std::pair(tensor.begin, tensor.bytes);
  });
  check_coverage(tensors, data_begin, file_bytes, what);
  return tensors;
}

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path) : file_(path) {
  const std::string what = shown(path.string(), 300);
  const std::string header = read_header(file_, what);
  tensors_ = parse_safetensors_header(header, 8 + header.size(),
                                      static_cast<std::uint64_t>(file_.size().n), what);
}

}  // namespace poise
