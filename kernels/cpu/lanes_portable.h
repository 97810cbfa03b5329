#pragma once
// Sixteen float32 side by side, in plain C++. It defines the vector types of lanes_avx2.h and
// lanes_avx512.h, which give the same bits. Every operation is the IEEE one, lane by lane, rounded
// to nearest even; `fma` rounds once. The three headers define the same names: each of the
// lanes_*.cpp includes one of them, and then the algorithms (*_lanes.h), all of it in an unnamed
// namespace so that code for a newer instruction set never leaks into another file.

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "common/dtype.h"
#include "common/formats/bfloat12.h"
#include "kernels/cpu/lane_kernels.h"

namespace poise::cpu {
namespace {

struct Lanes {
  static constexpr int kCount = 16;
  // Registers for sums: how many rows of a tile fit, given the panels of 16 outputs beside them.
  static constexpr int kTileRows = 2;  // of four SSE registers each
  static constexpr int kTilePanels = 1;

  float at[kCount];

  template <typename Fn>
  static Lanes of(Fn fn) {
    Lanes result;
    for (int i = 0; i < kCount; ++i) {
      result.at[i] = fn(i);
    }
    return result;
  }

  static Lanes all(float x) {
    return of([x](int) { return x; });
  }
  static Lanes zero() { return all(0.0f); }

  static Lanes load(const float* from) {
    return of([from](int i) { return from[i]; });
  }
  static Lanes load(const Half* from) {
    return of([from](int i) { return to_float(from[i]); });
  }
  static Lanes load(const BFloat16* from) {
    return of([from](int i) { return to_float(from[i]); });
  }
  // The first `count` lanes, 0 in the others; nothing beyond them is read.
  template <typename T>
  static Lanes load_first(const T* from, int count) {
    return of([from, count](int i) { return i < count ? to_float(from[i]) : 0.0f; });
  }

  // From sixteen pairs, the first number in the low half of 32 bits: the first ones, the second ones.
  template <typename T>
  static void load_pairs(const std::uint32_t* from, const T*, Lanes& firsts, Lanes& seconds) {
    firsts = of([from](int i) { return to_float(T{static_cast<std::uint16_t>(from[i])}); });
    seconds = of([from](int i) { return to_float(T{static_cast<std::uint16_t>(from[i] >> 16)}); });
  }

  // Sixteen whole numbers: of a byte each, or of half a byte each, the low half first.
  static Lanes of_bytes(const std::uint8_t* from) {
    return of([from](int i) { return static_cast<float>(from[i]); });
  }
  static Lanes of_half_bytes(const std::uint8_t* from) {
    return of([from](int i) { return static_cast<float>((from[i / 2] >> (4 * (i % 2))) & 15); });
  }

  static float narrow(float x, float*) { return x; }
  static Half narrow(float x, Half*) { return to_half(x); }
  static BFloat16 narrow(float x, BFloat16*) { return to_bfloat16(x); }
  template <typename T>
  void store_first(T* to, int count) const {
    for (int i = 0; i < count; ++i) {
      to[i] = narrow(at[i], to);
    }
  }
  template <typename T>
  void store(T* to) const {
    store_first(to, kCount);
  }

  // The same where a lane is a number, or a NaN without a payload.
  template <typename T>
  void store_number(T* to) const {
    store(to);
  }

  // Rounded to the type of the pointer, and float32 again.
  template <typename T>
  Lanes rounded(const T*) const {
    return of([this](int i) { return to_float(narrow(at[i], static_cast<T*>(nullptr))); });
  }
  // The same where no lane is not a number.
  template <typename T>
  Lanes rounded_number(const T* type) const {
    return rounded(type);
  }

  // Sixteen signed bytes; the low and the high halves of sixteen bytes, each less 8.
  static Lanes int8s(const std::int8_t* from) {
    return of([from](int i) { return static_cast<float>(from[i]); });
  }
  static Lanes low_int4s(const std::uint8_t* from) {
    return of([from](int i) { return static_cast<float>((from[i] & 15) - 8); });
  }
  static Lanes high_int4s(const std::uint8_t* from) {
    return of([from](int i) { return static_cast<float>((from[i] >> 4) - 8); });
  }

  // bfloat12 (common/formats/bfloat12.h): sixteen exponents, each where two bfloat16 numbers side by side in 32
  // bits have theirs; and the numbers of an even and an odd input by such bases. An escape has exponent 0.
  static Lanes exponents(const std::uint8_t* from) {
    return of([from](int i) {
      return std::bit_cast<float>(std::uint32_t{from[i]} << 7 | std::uint32_t{from[i]} << 23);
    });
  }
  static void bfloat12s(const std::uint8_t* rest, const std::uint8_t* codes, Lanes bases,
                        Lanes& even, Lanes& odd) {
    even = of([&](int i) { return bfloat12(rest[2 * i], codes[i] & 15u, bases.at[i]); });
    odd = of([&](int i) { return bfloat12(rest[2 * i + 1], codes[i] >> 4, bases.at[i]); });
  }
  static float bfloat12(std::uint32_t rest, std::uint32_t code, float base) {
    const std::uint32_t exponent =
        code < kBfloat12Escape ? (std::bit_cast<std::uint32_t>(base) >> 23) - code : 0;
    return std::bit_cast<float>((rest & 0x80) << 24 | (rest & 0x7f) << 16 | exponent << 23);
  }
  // Lanes that are bfloat16 numbers already, each with the bits that it has.
  void store_exact(BFloat16* to) const {
    for (int i = 0; i < kCount; ++i) {
      to[i].bits = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(at[i]) >> 16);
    }
  }

  // to[i] = code i · scale + offset, for `count` codes of 4 bits of one group, two in a byte, the low half
  // first. False where a set has no quick way for them.
  template <typename T>
  static bool numbers_of_int4s(T*, const std::byte*, int, Lanes, Lanes) {
    return false;
  }

  // a · b + c, rounded once.
  static Lanes fma(Lanes a, Lanes b, Lanes c) {
    return of([&](int i) { return std::fma(a.at[i], b.at[i], c.at[i]); });
  }
  // The second where either is not a number.
  static Lanes max(Lanes a, Lanes b) {
    return of([&](int i) { return a.at[i] > b.at[i] ? a.at[i] : b.at[i]; });
  }
  static Lanes abs(Lanes a) {
    return of([&](int i) { return std::fabs(a.at[i]); });
  }
  // a < b ? yes : no; no where either is not a number.
  static Lanes where_less(Lanes a, Lanes b, Lanes yes, Lanes no) {
    return of([&](int i) { return a.at[i] < b.at[i] ? yes.at[i] : no.at[i]; });
  }
  // The first `count` lanes of `yes`, the others of `no`.
  static Lanes first(int count, Lanes yes, Lanes no) {
    return of([&](int i) { return i < count ? yes.at[i] : no.at[i]; });
  }
  // 2ⁿ for whole n in [-126, 127]; anything else gives some number.
  static Lanes power_of_two(Lanes n) {
    return of([&](int i) {
      // Adding 2²³ + 127 leaves n + 127 in the low bits of the mantissa.
      const auto bits = std::bit_cast<std::uint32_t>(n.at[i] + (8388608.0f + 127.0f));
      return std::bit_cast<float>(bits << 23);
    });
  }
  // Bit i: a[i] ≥ b[i].
  static std::uint32_t at_least(Lanes a, Lanes b) {
    std::uint32_t mask = 0;
    for (int i = 0; i < kCount; ++i) {
      mask |= static_cast<std::uint32_t>(a.at[i] >= b.at[i]) << i;
    }
    return mask;
  }

  // (x0 + x8) + (x4 + x12) …: halves are added until one is left.
  float sum() const {
    float part[kCount];
    store(part);
    for (int width = kCount / 2; width > 0; width /= 2) {
      for (int i = 0; i < width; ++i) {
        part[i] = part[i] + part[i + width];
      }
    }
    return part[0];
  }
  // Lane i: the sum of of[i].
  static Lanes sums(const Lanes (&of)[16]) {
    return Lanes::of([&](int i) { return of[i].sum(); });
  }
  // Of numbers; what it gives is unspecified where a lane is not one.
  float largest() const {
    float result = at[0];
    for (int i = 1; i < kCount; ++i) {
      result = result > at[i] ? result : at[i];
    }
    return result;
  }
};

inline Lanes operator+(Lanes a, Lanes b) {
  return Lanes::of([&](int i) { return a.at[i] + b.at[i]; });
}
inline Lanes operator-(Lanes a, Lanes b) {
  return Lanes::of([&](int i) { return a.at[i] - b.at[i]; });
}
inline Lanes operator*(Lanes a, Lanes b) {
  return Lanes::of([&](int i) { return a.at[i] * b.at[i]; });
}
inline Lanes operator/(Lanes a, Lanes b) {
  return Lanes::of([&](int i) { return a.at[i] / b.at[i]; });
}

inline float square_root(float x) { return std::sqrt(x); }

// to[16 · c + i] = from[i · stride + c] for i in [0, rows), 0 for the rows up to 16; c in [0, cols).
// kStream: it will not be read soon, and may be written past the caches; then call end_streaming()
// before another thread learns of it.
template <bool kStream = false, typename From, typename To>
inline void transpose_16(To* to, const From* from, std::int64_t stride, int rows,
                         std::int64_t cols) {
  for (std::int64_t c = 0; c < cols; ++c) {
    for (int i = 0; i < 16; ++i) {
      if constexpr (sizeof(To) == sizeof(From)) {
        to[16 * c + i] = i < rows ? from[i * stride + c] : To{};
      } else {
        to[16 * c + i] = i < rows ? to_float(from[i * stride + c]) : 0.0f;
      }
    }
  }
}

inline void end_streaming() {}

}  // namespace
}  // namespace poise::cpu
