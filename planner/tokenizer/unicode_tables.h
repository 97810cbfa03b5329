#pragma once
// The general category of every code point, as HuggingFace's `tokenizers` sees it, the few sets that
// do not follow from categories, and what normal form C takes. Data only, made by
// tests/golden/make_tokenizer_golden.py.

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

// A character that is canonically the same as `first` and then `second`, which is 0 for one alone.
struct Decomposition {
  char32_t whole, first, second;
  bool composes;  // normal form C joins the two again
};

// Canonical combining classes other than 0. Both ends belong to it.
struct CombiningRun {
  char32_t first, last;
  std::uint8_t combining_class;
};

extern const CategoryRun kCategoryRuns[];
extern const std::size_t kCategoryRunsCount;
extern const CodePointRange kSpaces[];
extern const std::size_t kSpacesCount;
extern const CodePointRange kWordsBeyond[];
extern const std::size_t kWordsBeyondCount;
extern const CodePointRange kNumericBeyond[];
extern const std::size_t kNumericBeyondCount;
extern const Decomposition kDecompositions[];  // by `whole`; without Hangul's syllables
extern const std::size_t kDecompositionsCount;
extern const CombiningRun kCombiningRuns[];  // by `first`
extern const std::size_t kCombiningRunsCount;

}  // namespace poise
