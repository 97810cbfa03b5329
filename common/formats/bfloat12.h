#pragma once
// bfloat16 weights in 12 bits and a little, without loss (`--pack-weights`). A bfloat16 is a sign, 8 bits of
// exponent and 7 of mantissa, and the exponents of neighbouring weights lie close together: a code of 4 bits
// says how far one is below its group's base. A group is kBfloat12Group inputs of one row.
//
//   code 0 … 13   exponent base - code
//   code 14       an escape: the exponent stands in the panel's table
//   code 15       exponent 0: zeros and subnormal numbers
//
// Signs and mantissas are kept as they are, so every pattern of 16 bits comes out again, numbers or not. A
// panel of 16 rows:
//
//   rest       (ceil(cols / 2), 16, 2) bytes: the sign above the 7 bits of mantissa, of an even input and of
//              the odd one behind it
//   codes      (ceil(cols / 2), 16) bytes; the low half of a byte is an even input, the high half the odd one
//              behind it
//   bases      (groups, 16) bytes
//   escapes    (room) words of 32 bits: input << 12 | row of the panel << 8 | exponent, ascending; the words
//              behind the last escape are kNoEscape
//
// A group's base is that of its exponents above 0 which leaves the fewest escapes, the largest of these, or
// 0 where it has none. The table has room for about one weight in 256, Gaussian ones have an escape in 5,000:
// so a panel's size depends on its shape alone, and a matrix with more escapes cannot be packed. Pure functions.

#include <cstdint>

#include "common/units.h"

namespace poise {

inline constexpr std::int32_t kBfloat12Group = 128;
inline constexpr std::uint32_t kBfloat12Escape = 14, kBfloat12NoExponent = 15;  // codes
inline constexpr std::uint32_t kNoEscape = 0xffffffffu;

// Where the parts of a panel lie; every offset and the size are multiples of 16.
struct Bfloat12Panel {
  std::int64_t codes, bases, escapes;  // bytes from the panel's start
  std::int32_t room;                   // escapes that the table can hold
  Bytes bytes;
};
constexpr Bfloat12Panel bfloat12_panel(std::int32_t cols) {
  const std::int64_t codes = ceil_div(cols, 2) * 32;
  const std::int64_t bases = codes + ceil_div(cols, 2) * 16;
  const std::int64_t escapes = bases + ceil_div(cols, kBfloat12Group) * 16;
  const std::int64_t room = round_up(cols / 16 + 8, 4);
  return {.codes = codes,
          .bases = bases,
          .escapes = escapes,
          .room = static_cast<std::int32_t>(room),
          .bytes = {escapes + room * 4}};
}

constexpr std::uint32_t escape_at(std::int64_t input, std::int64_t row, std::uint32_t exponent) {
  return static_cast<std::uint32_t>(input << 12 | row << 8) | exponent;
}
constexpr std::int64_t input_of_escape(std::uint32_t escape) { return escape >> 12; }
constexpr std::uint32_t row_of_escape(std::uint32_t escape) { return escape >> 8 & 15; }
constexpr std::uint32_t exponent_of_escape(std::uint32_t escape) { return escape & 255; }

}  // namespace poise
