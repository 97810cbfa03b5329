#include "planner/results/result_json.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "common/trouble.h"
#include "planner/tokenizer/unicode.h"

namespace poise {
namespace {

constexpr char kHex[] = "0123456789abcdef";

void append_escape(std::string& out, unsigned code) {
  out += "\\u";
  for (int shift = 12; shift >= 0; shift -= 4) {
    out += kHex[(code >> shift) & 0xf];
  }
}

// Bytes of `text` at `at` that stand for themselves in a JSON string.
bool plain(char c) {
  const auto byte = static_cast<unsigned char>(c);
  return byte >= 0x20 && byte < 0x7f && c != '"' && c != '\\';
}

// One character of valid UTF-8 that is not plain ASCII.
void append_character(std::string& out, std::string_view character, char32_t code) {
  switch (code) {
    case U'"':
      out += "\\\"";
      return;
    case U'\\':
      out += "\\\\";
      return;
    case U'\n':
      out += "\\n";
      return;
    case U'\r':
      out += "\\r";
      return;
    case U'\t':
      out += "\\t";
      return;
    default:
      break;
  }
  const bool control = code < 0x20 || (code >= 0x7f && code < 0xa0);
  if (control || code == 0x2028 || code == 0x2029) {
    append_escape(out, code);
  } else {
    out += character;
  }
}

void append_escaped(std::string& out, std::string_view text) {
  for (std::size_t at = 0; at < text.size();) {
    const auto special = std::find_if_not(text.begin() + at, text.end(), plain) - text.begin();
    out += text.substr(at, special - at);
    at = special;
    if (at < text.size()) {
      const CodePoint point = code_point_at(text, at);
      append_character(out, text.substr(at, point.bytes), point.value);
      at += point.bytes;
    }
  }
}

}  // namespace

void append_json_text(std::string& out, std::string_view text) {
  out += '"';
  if (invalid_utf8_at(text)) {
    std::string repaired;
    append_lossy(repaired, text, /*more_follow=*/false);
    append_escaped(out, repaired);
  } else {
    append_escaped(out, text);
  }
  out += '"';
}

void append_json_logprob(std::string& out, float value) {
  check(!std::isnan(value) && value < HUGE_VALF, "a reported log probability is a number");
  value = std::max(value, -9999.0f);
  char digits[32];
  const auto end = std::to_chars(digits, digits + sizeof digits, value).ptr;
  const std::string_view shortest(digits, static_cast<std::size_t>(end - digits));
  out += shortest;
  if (shortest.find_first_of(".e") == std::string_view::npos) {
    out += ".0";
  }
}

void append_json_integer(std::string& out, std::int64_t value) {
  char digits[24];
  const auto end = std::to_chars(digits, digits + sizeof digits, value).ptr;
  out.append(digits, static_cast<std::size_t>(end - digits));
}

}  // namespace poise
