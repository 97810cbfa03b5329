#pragma once
// Units and ids as types, so that arguments cannot be swapped and the type says what a number is.
// Plain values: trivially copyable, comparable, printable with fmt through their `n`. Only arithmetic
// that makes sense for the unit is defined.

#include <compare>
#include <cstdint>

namespace poise {

// A quantity counts something; two quantities of one unit add, and scale by a plain number.
template <typename Unit, typename Number = std::int64_t>
struct Quantity {
  Number n{};

  friend constexpr auto operator<=>(const Quantity&, const Quantity&) = default;
  friend constexpr Quantity operator+(Quantity a, Quantity b) { return {a.n + b.n}; }
  friend constexpr Quantity operator-(Quantity a, Quantity b) { return {a.n - b.n}; }
  friend constexpr Quantity operator*(Quantity a, Number b) { return {a.n * b}; }
  friend constexpr Quantity operator*(Number a, Quantity b) { return {a * b.n}; }
  friend constexpr Quantity operator/(Quantity a, Number b) { return {a.n / b}; }
  friend constexpr Number operator/(Quantity a, Quantity b) { return a.n / b.n; }
  constexpr Quantity& operator+=(Quantity b) {
    n += b.n;
    return *this;
  }
  constexpr Quantity& operator-=(Quantity b) {
    n -= b.n;
    return *this;
  }
};

using Bytes = Quantity<struct BytesUnit>;
using Tokens = Quantity<struct TokensUnit, std::int32_t>;
using Seconds = Quantity<struct SecondsUnit, double>;

// Bytes per second, as for a link or a disk.
inline double rate(Bytes bytes, Seconds time) {
  return time.n > 0 ? static_cast<double>(bytes.n) / time.n : 0;
}

// An id names one thing of its kind; ids compare and index, they do not add.
template <typename Kind>
struct Id {
  std::uint32_t n{};
  friend constexpr auto operator<=>(const Id&, const Id&) = default;
};

using LayerId = Id<struct LayerKind>;  // 0 is the decoder layer nearest the embedding
using BlockId =
    Id<struct BlockIdKind>;  // a block's number within its kind and place, the same in every layer
using SlotId = Id<struct SlotKind>;        // a block-sized place in a device buffer
using RequestId = Id<struct RequestKind>;  // the request's line in the input file, counted from 1

using TokenId = std::int32_t;

inline constexpr Bytes kKiB{1 << 10};
inline constexpr Bytes kMiB{1 << 20};
inline constexpr Bytes kGiB{1 << 30};

// Tokens in one block of context, KV or ACT.
inline constexpr std::int32_t kBlockTokens = 16;

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
constexpr std::int64_t round_up(std::int64_t a, std::int64_t to) { return ceil_div(a, to) * to; }

}  // namespace poise
