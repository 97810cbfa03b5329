#include "planner/tokenizer/pattern.h"

#include <cctype>
#include <optional>

#include "common/files/regular_file.h"
#include "common/trouble.h"
#include "planner/tokenizer/pattern_program.h"

namespace poise {
namespace {

using Op = Instruction::Op;

// Patterns in use take 2 to 10 steps a byte. The first number lets short texts be unusual.
constexpr std::uint64_t kStepsAtLeast = 100000;
constexpr std::uint64_t kStepsPerByte = 256;

class Matcher {
 public:
  Matcher(const PatternProgram& program, std::string_view text)
      : program_(program),
        text_(text),
        steps_allowed_(kStepsAtLeast + kStepsPerByte * text.size()) {}

  // The leftmost match that begins at or after `from`.
  std::optional<Pattern::Match> find(std::size_t from) {
    for (std::size_t begin = from; begin <= text_.size(); begin = after(begin)) {
      count_step();
      if (!can_go_on(0, begin)) {
        continue;
      }
      if (const std::optional<std::size_t> end = match(0, begin)) {
        return Pattern::Match{begin, *end};
      }
    }
    return std::nullopt;
  }

  // Past the character at `at`; past the end, one further.
  std::size_t after(std::size_t at) const {
    return at < text_.size() ? at + code_point_at(text_, at).bytes : at + 1;
  }

 private:
  // Where to go back to, and with what.
  struct Choice {
    enum class Kind : std::uint8_t {
      other,    // go on at `at`, once
      shorter,  // a greedy run that ends at `at` may end earlier, down to `least`
      longer,   // a lazy run that ends at `at` may take up to `more` characters more
    };
    Kind kind;
    std::uint32_t code;
    std::size_t at;
    std::size_t least = 0;
    std::uint32_t more = 0;
  };

  void count_step() {
    if (++steps_ > steps_allowed_) {
      fail(
          "{}: the pattern {} needs more than {} steps for a text of {} bytes; the text cannot be "
          "split",
          program_.what, shown(program_.expression, 120), steps_allowed_, text_.size());
    }
  }

  std::size_t next_byte(std::size_t at) const {
    return at < text_.size() ? static_cast<unsigned char>(text_[at]) : kEndOfText;
  }
  bool can_go_on(std::uint32_t code, std::size_t at) const {
    return program_.next[code][next_byte(at)];
  }

  // Past the character at `at` if it is in the set.
  bool take_one(const CharSet& set, std::size_t& at) const {
    if (at == text_.size()) {
      return false;
    }
    const auto byte = static_cast<unsigned char>(text_[at]);
    if (byte < 0x80) {
      at += set.contains_ascii(byte);
      return set.contains_ascii(byte);
    }
    const CodePoint c = code_point_at(text_, at);
    if (!set.contains(c.value)) {
      return false;
    }
    at += c.bytes;
    return true;
  }

  // Where the code at `code` ends when it starts at `begin`. Calls itself only for the bodies of
  // look-aheads and atomic groups, whose nesting the parser bounds.
  std::optional<std::size_t> match(std::uint32_t code, std::size_t begin) {
    const std::size_t bottom = choices_.size();
    std::size_t at = begin;
    for (;;) {
      count_step();
      const Instruction& now = program_.code[code];
      bool matches = true;
      switch (now.op) {
        case Op::accept:
          choices_.resize(bottom);
          return at;
        case Op::one:
          matches = take_one(program_.sets[now.set], at);
          ++code;
          break;
        case Op::run:
          matches = run(now, code + 1, at);
          ++code;
          break;
        case Op::fork: {
          const Ways ways = program_.ways[now.ways][next_byte(at)];
          if (ways.second != 0) {
            choices_.push_back({Choice::Kind::other, ways.second, at});
          }
          code = ways.first;
          break;
        }
        case Op::jump:
          code = now.target;
          break;
        case Op::look:
          matches = match(code + 1, at).has_value() != now.negative;
          code = now.target;
          break;
        case Op::atomic:
          if (const std::optional<std::size_t> end = match(code + 1, at)) {
            at = *end;
          } else {
            matches = false;
          }
          code = now.target;
          break;
      }
      if (!matches && !go_back(bottom, code, at)) {
        return std::nullopt;
      }
    }
  }

  bool run(const Instruction& run, std::uint32_t then, std::size_t& at) {
    const CharSet& set = program_.sets[run.set];
    std::uint32_t taken = 0;
    while (taken < run.least && take_one(set, at)) {
      count_step();
      ++taken;
    }
    if (taken < run.least) {
      return false;
    }
    if (run.greed == Greed::lazy) {
      choices_.push_back({Choice::Kind::longer, then, at, 0, run.most - run.least});
      return true;
    }
    const std::size_t least = at;
    while (taken < run.most && take_one(set, at)) {
      count_step();
      ++taken;
    }
    if (run.greed == Greed::greedy && at > least) {
      choices_.push_back({Choice::Kind::shorter, then, at, least});
    }
    return true;
  }

  // To the latest choice that still has something to offer.
  bool go_back(std::size_t bottom, std::uint32_t& code, std::size_t& at) {
    while (choices_.size() > bottom) {
      count_step();
      Choice& choice = choices_.back();
      code = choice.code;
      bool offers = true;
      switch (choice.kind) {
        case Choice::Kind::other:
          at = choice.at;
          choices_.pop_back();
          return true;
        case Choice::Kind::shorter:
          offers = choice.at > choice.least;
          while (offers && is_continuation(text_[--choice.at])) {
          }
          break;
        case Choice::Kind::longer:
          offers = choice.more > 0 && take_one(set_of_run_before(code), choice.at);
          --choice.more;
          break;
      }
      if (!offers) {
        choices_.pop_back();
      } else if (can_go_on(code, choice.at)) {
        at = choice.at;
        return true;
      }
    }
    return false;
  }

  const CharSet& set_of_run_before(std::uint32_t code) const {
    return program_.sets[program_.code[code - 1].set];
  }

  const PatternProgram& program_;
  std::string_view text_;
  std::uint64_t steps_ = 0, steps_allowed_;
  std::vector<Choice> choices_;
};

}  // namespace

Pattern Pattern::compile(std::string_view expression, const std::string& what) {
  return Pattern(std::make_shared<const PatternProgram>(compile_program(expression, what)));
}

Pattern Pattern::literal(std::string_view text, const std::string& what) {
  std::string escaped;
  for (const char c : text) {
    if (std::ispunct(static_cast<unsigned char>(c)) != 0) {
      escaped += '\\';
    }
    escaped += c;
  }
  return compile(escaped, what);
}

void Pattern::find_all(std::string_view text, std::vector<Match>& matches) const {
  matches.clear();
  Matcher matcher(*program_, text);
  for (std::size_t from = 0; from <= text.size();) {
    const std::optional<Match> match = matcher.find(from);
    if (!match) {
      return;
    }
    if (match->begin == match->end && !matches.empty() && matches.back().end == match->end) {
      from = matcher.after(from);
      continue;
    }
    matches.push_back(*match);
    from = match->end;
  }
}

}  // namespace poise
