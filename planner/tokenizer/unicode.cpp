#include "planner/tokenizer/unicode.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <span>

namespace poise {
namespace {

constexpr std::string_view kCategoryNames[] = {
    "Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Me", "Nd", "Nl", "No", "Pc", "Pd", "Ps", "Pe",
    "Pi", "Pf", "Po", "Sm", "Sc", "Sk", "So", "Zs", "Zl", "Zp", "Cc", "Cf", "Cs", "Co", "Cn"};

constexpr CategoryMask kWordCategories =
    mask_of(Category::Lu) | mask_of(Category::Ll) | mask_of(Category::Lt) | mask_of(Category::Lm) |
    mask_of(Category::Lo) | mask_of(Category::Mn) | mask_of(Category::Mc) | mask_of(Category::Me) |
    mask_of(Category::Nd) | mask_of(Category::Nl) | mask_of(Category::Pc);

constexpr CategoryMask kNumberCategories =
    mask_of(Category::Nd) | mask_of(Category::Nl) | mask_of(Category::No);

bool contains(std::span<const CodePointRange> ranges, char32_t c) {
  return std::any_of(ranges.begin(), ranges.end(),
                     [c](CodePointRange range) { return range.first <= c && c <= range.last; });
}

bool in_categories(char32_t c, CategoryMask mask) {
  return (mask & mask_of(category_table()[c])) != 0;
}

// What a character's first byte says of it: its length (0: no first byte) and the range of the
// second byte, which rules out overlong forms, surrogates and what lies beyond U+10FFFF.
struct Lead {
  std::uint8_t length, second_first, second_last;
};

Lead lead_of(unsigned char byte) {
  if (byte < 0x80) return {1, 0, 0};
  if (byte < 0xC2) return {0, 0, 0};
  if (byte < 0xE0) return {2, 0x80, 0xBF};
  if (byte == 0xE0) return {3, 0xA0, 0xBF};
  if (byte == 0xED) return {3, 0x80, 0x9F};
  if (byte < 0xF0) return {3, 0x80, 0xBF};
  if (byte == 0xF0) return {4, 0x90, 0xBF};
  if (byte < 0xF4) return {4, 0x80, 0xBF};
  if (byte == 0xF4) return {4, 0x80, 0x8F};
  return {0, 0, 0};
}

// How many bytes at `at` can begin one character, at least 1; `whole` if they make it.
struct Utf8Sequence {
  std::size_t bytes;
  bool whole;
};

Utf8Sequence sequence_at(std::string_view bytes, std::size_t at) {
  const Lead lead = lead_of(static_cast<unsigned char>(bytes[at]));
  if (lead.length <= 1) {
    return {1, lead.length == 1};
  }
  std::size_t n = 1;
  while (n < lead.length && at + n < bytes.size()) {
    const auto byte = static_cast<unsigned char>(bytes[at + n]);
    const bool fits = n == 1 ? lead.second_first <= byte && byte <= lead.second_last
                             : is_continuation(static_cast<char>(byte));
    if (!fits) {
      break;
    }
    ++n;
  }
  return {n, n == lead.length};
}

}  // namespace

std::optional<CategoryMask> category_mask(std::string_view name) {
  CategoryMask mask = 0;
  for (std::size_t n = 0; n < std::size(kCategoryNames); ++n) {
    const bool group = name.size() == 1 && kCategoryNames[n][0] == name[0];
    if (group || kCategoryNames[n] == name) {
      mask |= CategoryMask{1} << n;
    }
  }
  if (mask == 0) {
    return std::nullopt;
  }
  return mask;
}

const Category* category_table() {
  static const std::unique_ptr<const Category[]> table = [] {
    auto categories = std::make_unique<Category[]>(kLastCodePoint + 1);
    for (std::size_t n = 0; n < kCategoryRunsCount; ++n) {
      const char32_t end =
          n + 1 < kCategoryRunsCount ? kCategoryRuns[n + 1].first : kLastCodePoint + 1;
      std::fill(categories.get() + kCategoryRuns[n].first, categories.get() + end,
                kCategoryRuns[n].category);
    }
    return categories;
  }();
  return table.get();
}

bool is_space(char32_t c) { return contains({kSpaces, kSpacesCount}, c); }

bool is_word(char32_t c) {
  return in_categories(c, kWordCategories) || contains({kWordsBeyond, kWordsBeyondCount}, c);
}

bool is_numeric(char32_t c) {
  return in_categories(c, kNumberCategories) || contains({kNumericBeyond, kNumericBeyondCount}, c);
}

std::optional<std::size_t> invalid_utf8_at(std::string_view text) {
  for (std::size_t at = 0; at < text.size();) {
    if (at + 8 <= text.size()) {
      std::uint64_t eight = 0;
      std::memcpy(&eight, text.data() + at, 8);
      if ((eight & 0x8080808080808080u) == 0) {
        at += 8;
        continue;
      }
    }
    const Utf8Sequence sequence = sequence_at(text, at);
    if (!sequence.whole) {
      return at;
    }
    at += sequence.bytes;
  }
  return std::nullopt;
}

void append_utf8(std::string& text, char32_t c) {
  auto put = [&](char32_t byte) { text.push_back(static_cast<char>(byte)); };
  if (c < 0x80) {
    put(c);
  } else if (c < 0x800) {
    put(0xC0 | c >> 6);
    put(0x80 | (c & 0x3F));
  } else if (c < 0x10000) {
    put(0xE0 | c >> 12);
    put(0x80 | (c >> 6 & 0x3F));
    put(0x80 | (c & 0x3F));
  } else {
    put(0xF0 | c >> 18);
    put(0x80 | (c >> 12 & 0x3F));
    put(0x80 | (c >> 6 & 0x3F));
    put(0x80 | (c & 0x3F));
  }
}

std::size_t append_lossy(std::string& text, std::string_view bytes, bool more_follow) {
  std::size_t at = 0;
  while (at < bytes.size()) {
    const Utf8Sequence sequence = sequence_at(bytes, at);
    if (sequence.whole) {
      text.append(bytes.substr(at, sequence.bytes));
    } else {
      const bool incomplete = at + sequence.bytes == bytes.size() &&
                              lead_of(static_cast<unsigned char>(bytes[at])).length;
      if (more_follow && incomplete) {
        break;
      }
      text.append("\uFFFD");
    }
    at += sequence.bytes;
  }
  return at;
}

}  // namespace poise
