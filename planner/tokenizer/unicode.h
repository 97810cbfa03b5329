#pragma once
// What the tokenizer needs of Unicode: UTF-8 in both directions, and what kind of character a code
// point is to HuggingFace's `tokenizers`. Everything here may be called from any thread.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "planner/tokenizer/unicode_tables.h"

namespace poise {

inline constexpr char32_t kLastCodePoint = 0x10FFFF;

// One bit for each category.
using CategoryMask = std::uint32_t;
constexpr CategoryMask mask_of(Category category) {
  return CategoryMask{1} << static_cast<unsigned>(category);
}

// The categories that `\p{name}` stands for: "Lu", or "L" for all letters. Nothing if unknown.
std::optional<CategoryMask> category_mask(std::string_view name);

// Indexed by code point.  (kLastCodePoint + 1)
const Category* category_table();

bool is_space(char32_t c);    // White_Space
bool is_word(char32_t c);     // \w of Rust's regex: what bounds an added token with `single_word`
bool is_numeric(char32_t c);  // what the pre-tokenizer Digits takes for a digit

// Where `text` stops being UTF-8 (no surrogates, nothing overlong), or nothing if all of it is.
std::optional<std::size_t> invalid_utf8_at(std::string_view text);

struct CodePoint {
  char32_t value;
  std::uint32_t bytes;
};
// The character that begins at `at`. REQUIRES: valid UTF-8, `at` at a character's first byte.
inline CodePoint code_point_at(std::string_view text, std::size_t at) {
  auto byte = [&](std::size_t n) { return static_cast<unsigned char>(text[at + n]); };
  const char32_t first = byte(0);
  if (first < 0x80) {
    return {first, 1};
  }
  if (first < 0xE0) {
    return {(first & 0x1F) << 6 | (byte(1) & 0x3F), 2};
  }
  if (first < 0xF0) {
    return {(first & 0x0F) << 12 | static_cast<char32_t>(byte(1) & 0x3F) << 6 | (byte(2) & 0x3F),
            3};
  }
  return {(first & 0x07) << 18 | static_cast<char32_t>(byte(1) & 0x3F) << 12 |
              static_cast<char32_t>(byte(2) & 0x3F) << 6 | (byte(3) & 0x3F),
          4};
}

inline bool is_continuation(char byte) { return (static_cast<unsigned char>(byte) & 0xC0) == 0x80; }

void append_utf8(std::string& text, char32_t c);

// Appends `bytes` to `text` with U+FFFD for each maximal part that is not UTF-8. With
// `more_follow` it stops before an incomplete last character. Returns how many bytes it took.
std::size_t append_lossy(std::string& text, std::string_view bytes, bool more_follow);

}  // namespace poise
