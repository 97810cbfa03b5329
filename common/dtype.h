#pragma once
// Number types: weights and blocks are stored in one of these; sums are always float32. Conversions
// round to nearest even, as PyTorch does. They are pure functions; any thread may call
// them.

#include <bit>
#include <cstdint>
#include <optional>
#include <string_view>

#include "common/units.h"

namespace poise {

enum class DType : std::uint32_t { float32 = 0, float16 = 1, bfloat16 = 2 };

constexpr Bytes size_of(DType type) { return {type == DType::float32 ? 4 : 2}; }
std::string_view name_of(DType type);  // "float32", as PyTorch and config.json spell it
// From config.json, a flag or a safetensors header ("F16", "half", "torch.float16" …).
std::optional<DType> dtype_from(std::string_view name);

struct Half {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};

constexpr float to_float(BFloat16 x) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16);
}
constexpr float to_float(float x) { return x; }
constexpr float to_float(Half x) {
  const std::uint32_t sign = (x.bits & 0x8000u) << 16;
  const std::uint32_t exponent = (x.bits >> 10) & 0x1fu;
  const std::uint32_t mantissa = x.bits & 0x3ffu;
  if (exponent == 0x1f) {
    return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  }
  if (exponent != 0) {
    return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
  }
  // Zero and subnormals: mantissa · 2⁻²⁴ is exact in float32.
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
  return sign != 0 ? -magnitude : magnitude;
}

constexpr BFloat16 to_bfloat16(float x) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return {static_cast<std::uint16_t>((bits >> 16) | 0x40u)};  // a NaN stays one
  }
  return {static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

constexpr Half to_half(float x) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    return {static_cast<std::uint16_t>(sign | 0x7e00u)};
  }
  if (magnitude >= 0x477ff000u) {  // 65520 and above round to infinity
    return {static_cast<std::uint16_t>(sign | 0x7c00u)};
  }
  if (magnitude < 0x38800000u) {  // below 2⁻¹⁴: adding 0.5 aligns the mantissa and rounds to even
                                  // in hardware's way
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return {
        static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3f000000u))};
  }
  const std::uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return {static_cast<std::uint16_t>(sign | ((rounded - 0x38000000u) >> 13))};
}

}  // namespace poise
