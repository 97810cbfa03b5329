#pragma once
// What a pattern is compiled to: instructions for a matcher that remembers where to go back to.
// Private to Pattern.

#include <array>
#include <bitset>
#include <cstdint>
#include <string>
#include <vector>

#include "planner/tokenizer/pattern_syntax.h"

namespace poise {

// Which bytes can come next; the last one stands for the end of the text.
inline constexpr std::size_t kEndOfText = 256;
using NextBytes = std::bitset<kEndOfText + 1>;

struct Instruction {
  enum class Op : std::uint8_t {
    accept,  // the pattern, or the body of a look-ahead or atomic group, has matched
    one,     // one character of sets[set]
    run,     // `least` to `most` characters of sets[set], as `greed` says
    fork,    // go on at `target`; failing that, at `other`
    jump,    // go on at `target`
    look,    // the body at the next instruction must match (or not: `negative`); then `target`
    atomic,  // the body at the next instruction, then `target`
  };
  Op op = Op::accept;
  Greed greed = Greed::greedy;
  bool negative = false;
  std::uint32_t set = 0;
  std::uint32_t least = 0, most = 0;
  std::uint32_t target = 0, other = 0;
  std::uint32_t ways = 0;  // of a fork: index into PatternProgram::ways
};

// Of a fork whose next byte is known: where to go on, and where failing that (0: nowhere).
struct Ways {
  std::uint16_t first = 0, second = 0;
};

struct PatternProgram {
  std::string expression, what;
  std::vector<Instruction> code;
  std::vector<CharSet> sets;
  std::vector<NextBytes> next;  // beside each instruction: the bytes it can go on with
  std::vector<std::array<Ways, kEndOfText + 1>> ways;
};

PatternProgram compile_program(std::string_view expression, const std::string& what);

}  // namespace poise
