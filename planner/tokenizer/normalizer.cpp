#include "planner/tokenizer/normalizer.h"

#include <algorithm>
#include <optional>
#include <span>
#include <unordered_map>

#include "common/trouble.h"
#include "planner/tokenizer/unicode.h"

namespace poise {
namespace {

// Text grows by a few bytes a character in every tokenizer in use.
constexpr std::size_t kGrowth = 64;
constexpr std::size_t kGrowthOfShortText = 1 << 20;

// Syllables of Hangul are composed by arithmetic (Unicode, section 3.12).
constexpr char32_t kSyllables = 0xAC00, kLeads = 0x1100, kVowels = 0x1161, kTails = 0x11A7;
constexpr char32_t kLeadCount = 19, kVowelCount = 21, kTailCount = 28;
constexpr char32_t kSyllableCount = kLeadCount * kVowelCount * kTailCount;

// The tables, arranged for look-up.
class Composition {
 public:
  static const Composition& get() {
    static const Composition composition;
    return composition;
  }

  // Whether normal form C could change a text with this character.
  bool matters(char32_t c) const {
    return c >= kDecompositions[0].whole &&
           (decompositions_.contains(c) || class_of(c) != 0 || joins_.contains(c) ||
            c - kVowels < kVowelCount || c - kTails < kTailCount);
  }

  std::uint8_t class_of(char32_t c) const {
    const std::span<const CombiningRun> runs(kCombiningRuns, kCombiningRunsCount);
    const auto after = std::ranges::upper_bound(runs, c, {}, &CombiningRun::first);
    return after != runs.begin() && c <= std::prev(after)->last ? std::prev(after)->combining_class
                                                                : std::uint8_t{0};
  }

  void decompose(char32_t c, std::u32string& out) const {
    if (c - kSyllables < kSyllableCount) {
      const char32_t n = c - kSyllables;
      out += kLeads + n / (kVowelCount * kTailCount);
      out += kVowels + n / kTailCount % kVowelCount;
      if (n % kTailCount != 0) {
        out += kTails + n % kTailCount;
      }
      return;
    }
    const auto entry =
        c < kDecompositions[0].whole ? decompositions_.end() : decompositions_.find(c);
    if (entry == decompositions_.end()) {
      out += c;
      return;
    }
    decompose(entry->second->first, out);
    if (entry->second->second != 0) {
      out += entry->second->second;  // never decomposed further
    }
  }

  std::optional<char32_t> compose(char32_t first, char32_t second) const {
    if (first - kLeads < kLeadCount && second - kVowels < kVowelCount) {
      return kSyllables + ((first - kLeads) * kVowelCount + (second - kVowels)) * kTailCount;
    }
    if (first - kSyllables < kSyllableCount && (first - kSyllables) % kTailCount == 0 &&
        second > kTails && second - kTails < kTailCount) {
      return first + (second - kTails);
    }
    const auto entry = pairs_.find(std::uint64_t{first} << 32 | second);
    return entry == pairs_.end() ? std::nullopt : std::optional(entry->second);
  }

 private:
  Composition() {
    for (const Decomposition& entry : std::span(kDecompositions, kDecompositionsCount)) {
      decompositions_.emplace(entry.whole, &entry);
      if (entry.composes) {
        pairs_.emplace(std::uint64_t{entry.first} << 32 | entry.second, entry.whole);
        joins_.emplace(entry.second, true);
      }
    }
  }

  std::unordered_map<char32_t, const Decomposition*> decompositions_;
  std::unordered_map<std::uint64_t, char32_t> pairs_;  // first << 32 | second → whole
  std::unordered_map<char32_t, bool> joins_;           // what can be a second
};

// Marks behind one character in the order of their classes.
void order_marks(std::u32string& text, const Composition& composition) {
  auto is_mark = [&](char32_t c) { return composition.class_of(c) != 0; };
  for (auto at = text.begin(); at != text.end();) {
    at = std::find_if(at, text.end(), is_mark);
    const auto end = std::find_if_not(at, text.end(), is_mark);
    std::stable_sort(at, end, [&](char32_t a, char32_t b) {
      return composition.class_of(a) < composition.class_of(b);
    });
    at = end;
  }
}

// Joins each character with the last starter, where no mark of its class or a higher one stands
// between.
void compose_all(std::u32string& text, const Composition& composition) {
  std::size_t kept = 0;
  std::optional<std::size_t> starter;
  std::uint8_t last_class = 0;  // of what was kept behind the starter
  for (const char32_t c : text) {
    const std::uint8_t own_class = composition.class_of(c);
    const bool adjacent = starter && *starter + 1 == kept;
    if (starter && (adjacent || (last_class != 0 && last_class < own_class))) {
      if (const auto whole = composition.compose(text[*starter], c)) {
        text[*starter] = *whole;
        continue;
      }
    }
    if (own_class == 0) {
      starter = kept;
    }
    last_class = own_class;
    text[kept++] = c;
  }
  text.resize(kept);
}

class StepRunner {
 public:
  explicit StepRunner(std::size_t size) : allowed_(kGrowth * size + kGrowthOfShortText) {}

  std::string operator()(const PrependStep& step, std::string text) const {
    return text.empty() ? text : grown(step.text + text);
  }
  std::string operator()(const NfcStep&, const std::string& text) const { return to_nfc(text); }
  std::string operator()(const ReplaceStep& step, const std::string& text) const {
    std::string out;
    std::size_t done = 0;
    for (std::size_t at = 0; (at = text.find(step.pattern, done)) != std::string::npos;) {
      out.append(text, done, at - done).append(step.content);
      done = at + step.pattern.size();
      require(out.size());
    }
    return grown(out.append(text, done));
  }

 private:
  void require(std::size_t size) const {
    if (size > allowed_) {
      fail("the tokenizer's normalizer makes more than {} bytes of the text; is it damaged?",
           allowed_);
    }
  }
  std::string grown(std::string text) const {
    require(text.size());
    return text;
  }

  std::size_t allowed_;
};

}  // namespace

std::string to_nfc(std::string_view text) {
  const Composition& composition = Composition::get();
  bool matters = false;
  std::u32string points;
  for (std::size_t at = 0; at < text.size();) {
    const CodePoint c = code_point_at(text, at);
    matters = matters || composition.matters(c.value);
    points += c.value;
    at += c.bytes;
  }
  if (!matters) {
    return std::string(text);
  }
  std::u32string apart;
  apart.reserve(points.size() + points.size() / 4);
  for (const char32_t c : points) {
    composition.decompose(c, apart);
  }
  order_marks(apart, composition);
  compose_all(apart, composition);
  std::string out;
  out.reserve(text.size());
  for (const char32_t c : apart) {
    append_utf8(out, c);
  }
  return out;
}

std::string Normalizer::normalize(std::string_view text) const {
  std::string now(text);
  const StepRunner runner(text.size());
  for (const NormalizerStep& step : steps_) {
    now = std::visit([&](const auto& one) { return runner(one, std::move(now)); }, step);
  }
  return now;
}

}  // namespace poise
