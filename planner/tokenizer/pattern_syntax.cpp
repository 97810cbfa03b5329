#include "planner/tokenizer/pattern_syntax.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "common/files/regular_file.h"
#include "common/trouble.h"

namespace poise {
namespace {

using Kind = PatternNode::Kind;

constexpr std::size_t kLongestExpression = 1 << 16;
constexpr std::uint32_t kMaxRepeats = 100000;  // Oniguruma's own limit
constexpr int kDeepestNesting = 64;

bool is_ascii_letter(char32_t c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }
bool is_ascii_digit(char32_t c) { return c >= '0' && c <= '9'; }

class Parser {
 public:
  Parser(std::string_view text, const std::string& what) : text_(text), what_(what) {}

  PatternNode parse() {
    PatternNode node = choice(false);
    if (!done()) {
      refuse("has a ) without (");
    }
    return node;
  }

 private:
  [[noreturn]] void refuse(std::string_view rule) const {
    fail("{}: the pattern {} {} (at its byte {}); only patterns of known meaning are taken", what_,
         shown(text_, 120), rule, at_);
  }

  bool done() const { return at_ == text_.size(); }
  bool sees(std::string_view next) const { return text_.substr(at_).starts_with(next); }
  bool take(std::string_view next) {
    if (!sees(next)) {
      return false;
    }
    at_ += next.size();
    return true;
  }
  char32_t take_character() {
    if (done()) {
      refuse("ends too early");
    }
    const CodePoint c = code_point_at(text_, at_);
    at_ += c.bytes;
    return c.value;
  }

  PatternNode choice(bool ignore_case) {
    PatternNode node;
    node.children.push_back(sequence(ignore_case));
    while (take("|")) {
      node.children.push_back(sequence(ignore_case));
    }
    if (node.children.size() == 1) {
      return std::move(node.children.front());
    }
    node.kind = Kind::choice;
    return node;
  }

  PatternNode sequence(bool ignore_case) {
    PatternNode node;
    char32_t previous = 0;  // the literal just before, where letters may fold together
    while (!done() && !sees("|") && !sees(")")) {
      char32_t literal = 0;
      PatternNode child = atom(ignore_case, literal);
      if (ignore_case && fold_together(previous, literal)) {
        refuse(
            "ignores the case of letters that some characters stand for together (ss, st, ff …)");
      }
      previous = literal;
      node.children.push_back(repeated(std::move(child)));
    }
    return node;
  }

  // ß is ss, ﬆ is st, and so on, when case is ignored.
  static bool fold_together(char32_t a, char32_t b) {
    static constexpr std::string_view kPairs[] = {"ss", "st", "ff", "fi", "fl"};
    return std::any_of(std::begin(kPairs), std::end(kPairs), [&](std::string_view pair) {
      return (a | 0x20) == static_cast<char32_t>(pair[0]) &&
             (b | 0x20) == static_cast<char32_t>(pair[1]);
    });
  }

  PatternNode atom(bool ignore_case, char32_t& literal) {
    if (take("(")) {
      return group(ignore_case);
    }
    if (take("[")) {
      return of_set(char_class(ignore_case));
    }
    if (take(".")) {
      CharSet::Term newline;
      newline.ranges = {{'\n', '\n'}};
      return of_set(CharSet({std::move(newline)}, true));
    }
    if (sees("^") || sees("$")) {
      refuse("has an anchor (^ or $)");
    }
    if (sees("*") || sees("+") || sees("?") || sees("{")) {
      refuse("repeats nothing, or has an unescaped {");
    }
    if (take("\\")) {
      CharSet::Term term;
      if (std::optional<char32_t> c = escape(term)) {
        literal = *c;
      } else if (ignore_case && term.categories != 0) {
        refuse("ignores case in \\p or \\d");
      } else {
        return of_set(CharSet({std::move(term)}, false));
      }
    } else {
      literal = take_character();
    }
    return of_set(ignore_case ? folded(literal) : CharSet::of(literal));
  }

  static PatternNode of_set(CharSet set) {
    PatternNode node;
    node.kind = Kind::set;
    node.set = std::make_unique<CharSet>(std::move(set));
    return node;
  }

  PatternNode group(bool ignore_case) {
    if (++depth_ > kDeepestNesting) {
      refuse("nests groups too deeply");
    }
    PatternNode node;
    node.kind = Kind::sequence;
    if (take("?i:")) {
      ignore_case = true;
    } else if (take("?=")) {
      node.kind = Kind::look_ahead;
    } else if (take("?!")) {
      node.kind = Kind::no_look_ahead;
    } else if (take("?>")) {
      node.kind = Kind::atomic;
    } else if (!take("?:") && sees("?")) {
      refuse("has a group of another kind than (..), (?:..), (?i:..), (?=..), (?!..), (?>..)");
    }
    node.children.push_back(choice(ignore_case));
    if (!take(")")) {
      refuse("has a ( without )");
    }
    --depth_;
    return node;
  }

  PatternNode repeated(PatternNode child) {
    PatternNode node;
    node.kind = Kind::repeat;
    bool counted = false;
    if (take("*")) {
      node.least = 0, node.most = kUnlimited;
    } else if (take("+")) {
      node.least = 1, node.most = kUnlimited;
    } else if (take("?")) {
      node.least = 0, node.most = 1;
    } else if (take("{")) {
      counted = true;
      counts(node);
    } else {
      return child;
    }
    if (child.kind == Kind::look_ahead || child.kind == Kind::no_look_ahead) {
      refuse("repeats a look-ahead");
    }
    // {2}? and {2}+ mean one thing to Oniguruma and another to everybody else.
    if (counted && (sees("+") || (sees("?") && node.least == node.most))) {
      refuse("repeats a repeat");
    }
    if (take("?")) {
      node.greed = Greed::lazy;
    } else if (take("+")) {
      node.greed = Greed::possessive;
    }
    if (sees("*") || sees("+") || sees("?") || sees("{")) {
      refuse("repeats a repeat");
    }
    node.children.push_back(std::move(child));
    return node;
  }

  void counts(PatternNode& node) {
    const std::optional<std::uint32_t> least = number();
    node.least = least.value_or(0);
    node.most = node.least;
    bool open = false;
    if (take(",")) {
      const std::optional<std::uint32_t> most = number();
      node.most = most.value_or(kUnlimited);
      open = true;
      if (!least && !most) {
        refuse("has an unescaped {");
      }
    }
    if ((!least && !open) || !take("}")) {
      refuse("has an unescaped {");
    }
    if (node.most < node.least) {
      refuse("repeats at least more often than at most");
    }
  }

  std::optional<std::uint32_t> number() {
    if (done() || !is_ascii_digit(static_cast<unsigned char>(text_[at_]))) {
      return std::nullopt;
    }
    std::uint32_t value = 0;
    while (!done() && is_ascii_digit(static_cast<unsigned char>(text_[at_]))) {
      value = value * 10 + static_cast<std::uint32_t>(text_[at_++] - '0');
      if (value > kMaxRepeats) {
        refuse("repeats too often");
      }
    }
    return value;
  }

  // After the backslash: the character it stands for, or nothing and then `term` is the set.
  std::optional<char32_t> escape(CharSet::Term& term) {
    const char32_t c = take_character();
    switch (c) {
      case 'n':
        return '\n';
      case 'r':
        return '\r';
      case 't':
        return '\t';
      case 'u':
        return hexadecimal(4, 4);
      case 'x': {
        if (take("{")) {
          const char32_t value = hexadecimal(1, 8);
          if (!take("}")) {
            refuse("has \\x{ without }");
          }
          return value;
        }
        const char32_t value = hexadecimal(2, 2);
        if (value >= 0x80) {
          refuse("has a byte that is no character");
        }
        return value;
      }
      case 's':
      case 'S':
        term.ranges.assign(kSpaces, kSpaces + kSpacesCount);
        term.negated = c == 'S';
        return std::nullopt;
      case 'd':
      case 'D':
        term.categories = mask_of(Category::Nd);
        term.negated = c == 'D';
        return std::nullopt;
      case 'p':
      case 'P':
        property(term, c == 'P');
        return std::nullopt;
      default:
        if (is_ascii_letter(c) || is_ascii_digit(c) || c >= 0x80 || c < 0x20) {
          refuse(fmt::format("has the escape \\{}", static_cast<char>(c < 0x80 ? c : '?')));
        }
        return c;
    }
  }

  void property(CharSet::Term& term, bool negated) {
    if (!take("{")) {
      refuse("has \\p without {");
    }
    term.negated = take("^") != negated;
    const std::size_t end = text_.find('}', at_);
    if (end == std::string_view::npos) {
      refuse("has \\p{ without }");
    }
    const std::string_view name = text_.substr(at_, end - at_);
    const std::optional<CategoryMask> mask = category_mask(name);
    if (!mask) {
      refuse(fmt::format("has \\p{{{}}}, which is no general category", shown(name, 30)));
    }
    term.categories = *mask;
    at_ = end + 1;
  }

  char32_t hexadecimal(int least, int most) {
    char32_t value = 0;
    int digits = 0;
    for (; digits < most && !done(); ++digits, ++at_) {
      const auto c = static_cast<unsigned char>(text_[at_]);
      const bool letter = (c | 0x20) >= 'a' && (c | 0x20) <= 'f';
      if (!is_ascii_digit(c) && !letter) {
        break;
      }
      value = value * 16 + (letter ? (c | 0x20u) - 'a' + 10 : c - '0');
    }
    if (digits < least || value > kLastCodePoint || (value >= 0xD800 && value < 0xE000)) {
      refuse("has an escape that is no character");
    }
    return value;
  }

  // ASCII letters and the two characters beyond ASCII that fold to one.
  CharSet folded(char32_t c) const {
    if (c >= 0x80) {
      refuse("ignores the case of characters beyond ASCII");
    }
    CharSet::Term term;
    add_folded(term, c);
    return CharSet({std::move(term)}, false);
  }
  static void add_folded(CharSet::Term& term, char32_t c) {
    term.ranges.push_back({c, c});
    if (is_ascii_letter(c)) {
      term.ranges.push_back({c ^ 0x20, c ^ 0x20});
      if ((c | 0x20) == 's') {
        term.ranges.push_back({0x17F, 0x17F});
      } else if ((c | 0x20) == 'k') {
        term.ranges.push_back({0x212A, 0x212A});
      }
    }
  }

  CharSet char_class(bool ignore_case) {
    const bool negated = take("^");
    CharSet::Term plain;
    std::vector<CharSet::Term> terms;
    bool first = true;
    while (first || !sees("]")) {
      if (sees("]") || sees("[") || sees("&&")) {
        refuse("has a class inside a class, or an unescaped ] or [ in one");
      }
      CharSet::Term set;
      const std::optional<char32_t> low = class_member(set);
      if (!low) {
        terms.push_back(std::move(set));
      } else {
        char32_t high = *low;
        if (sees("-") && !sees("-]")) {
          take("-");
          const std::optional<char32_t> end = sees("[") ? std::nullopt : class_member(set);
          if (!end || *end < *low) {
            refuse("has a range without an end, or backwards");
          }
          high = *end;
        }
        plain.ranges.push_back({*low, high});
      }
      if (!low && sees("-") && !sees("-]")) {
        refuse("has a range that begins with a set");
      }
      first = false;
    }
    take("]");
    if (ignore_case) {
      if (!terms.empty() || negated) {
        refuse("ignores case in a class that is not a plain list of characters");
      }
      plain = folded_class(plain);
    }
    if (!plain.ranges.empty()) {
      terms.push_back(std::move(plain));
    }
    return CharSet(std::move(terms), negated);
  }

  std::optional<char32_t> class_member(CharSet::Term& set) {
    if (take("\\")) {
      return escape(set);
    }
    return take_character();
  }

  CharSet::Term folded_class(const CharSet::Term& plain) const {
    CharSet::Term term;
    for (const CodePointRange& range : plain.ranges) {
      if (range.last >= 0x80) {
        refuse("ignores the case of characters beyond ASCII");
      }
      for (char32_t c = range.first; c <= range.last; ++c) {
        add_folded(term, c);
      }
    }
    return term;
  }

  std::string_view text_;
  const std::string& what_;
  std::size_t at_ = 0;
  int depth_ = 0;
};

}  // namespace

PatternNode parse_pattern(std::string_view expression, const std::string& what) {
  if (expression.empty() || expression.size() > kLongestExpression) {
    fail("{}: a pattern of {} bytes; 1 to {} are taken", what, expression.size(),
         kLongestExpression);
  }
  return Parser(expression, what).parse();
}

}  // namespace poise
