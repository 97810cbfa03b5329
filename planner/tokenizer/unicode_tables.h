#pragma once
// The general category of every code point, as HuggingFace's `tokenizers` sees it, and the few sets
// that do not follow from categories. Data only, made by tests/golden/make_tokenizer_golden.py.

#include <cstddef>
#include <cstdint>

namespace poise {

enum class Category : std::uint8_t {
  Lu,
  Ll,
  Lt,
  Lm,
  Lo,
  Mn,
  Mc,
  Me,
  Nd,
  Nl,
  No,
  Pc,
  Pd,
  Ps,
  Pe,  // clang-format off
  Pi, Pf, Po, Sm, Sc, Sk, So, Zs, Zl, Zp, Cc, Cf, Cs, Co, Cn,  // clang-format on
};

struct CategoryRun {
  char32_t first;
  Category category;
};

// Both ends belong to it.
struct CodePointRange {
  char32_t first, last;
};

extern const CategoryRun kCategoryRuns[];
extern const std::size_t kCategoryRunsCount;
extern const CodePointRange kSpaces[];
extern const std::size_t kSpacesCount;
extern const CodePointRange kWordsBeyond[];
extern const std::size_t kWordsBeyondCount;
extern const CodePointRange kNumericBeyond[];
extern const std::size_t kNumericBeyondCount;

}  // namespace poise
