#pragma once
// Packed matrices of every kind that tests of kernels unpack and multiply, with their numbers.

#include <fmt/core.h>

#include "tests/kernels/tensors.h"
#include "tests/support/packed_numbers.h"

namespace poise::test {

struct PackedCase {
  PackedFormat format;
  DType dtype;
  std::int32_t rows, cols, parts = 1;
};

inline std::string name_of(const PackedCase& c) {
  return fmt::format("{} of {} in groups of {} (scales {}, zeros {}, table {}), {} x {}",
                     poise::name_of(c.dtype), poise::name_of(c.format.codes), c.format.group,
                     poise::name_of(c.format.scale_dtype), c.format.zero_points,
                     c.format.input_groups, c.rows, c.cols);
}

struct PackedOperand {
  explicit PackedOperand(const PackedCase& c, std::uint32_t seed = 1) : test(c) {
    std::mt19937 random(seed);
    panels.resize(static_cast<std::size_t>(packed_bytes(c.format, c.rows, c.cols).n));
    fill_with_panels(c.format, c.cols, c.format.codes == Codes::int4 ? 0.2F : 0.01F, random,
                     panels);
    if (c.format.input_groups != 0) {
      groups = some_input_groups(c.format, c.parts, c.cols, random);
    }
    numbers = unpacked_numbers(c.format, c.dtype, c.rows, c.cols, panels.data(), groups);
  }
  Matrix matrix() const {
    return {.data = panels.data(),
            .rows = test.rows,
            .cols = test.cols,
            .dtype = test.dtype,
            .packed = test.format,
            .input_groups = groups.empty() ? nullptr : groups.data(),
            .parts = test.parts};
  }

  PackedCase test;
  std::vector<std::byte> panels;
  std::vector<std::uint16_t> groups;
  std::vector<float> numbers;
};

// All patterns of bfloat16 as bfloat12, (kSize, kSize). Row h has those whose upper byte is h: two exponents, 2h
// and 2h + 1. In every sixteenth row, every sixteenth is an escape.
struct EveryBfloat16 {
  static constexpr std::int32_t kSize = 256;

  EveryBfloat16() : panels(static_cast<std::size_t>(kMap.bytes.n) * kSize / 16) {
    for (std::int32_t row = 0; row < kSize; ++row) {
      std::byte* const panel = panels.data() + row / 16 * kMap.bytes.n;
      if (row % 16 == 0) {
        std::fill_n(panel + kMap.escapes, kMap.room * 4, std::byte{0xff});
      }
      for (std::int32_t k = 0; k < kSize; ++k) {
        bits.push_back(static_cast<std::uint16_t>(row * kSize + k));
        put(panel, row % 16, k, bits.back(), static_cast<std::uint32_t>(row % 128 * 2 + 1));
      }
    }
  }
  static void put(std::byte* panel, std::int32_t lane, std::int32_t k, std::uint32_t pattern,
                  std::uint32_t base) {
    const std::uint32_t exponent = pattern >> 7 & 255;
    std::uint32_t code = exponent == 0 ? 15 : base - exponent;
    if (lane == 3 && k % 16 == 5) {
      code = 14;
      const std::uint32_t escape = escape_at(k, lane, exponent);
      std::memcpy(panel + kMap.escapes + k / 16 * 4, &escape, 4);
    }
    panel[k / 2 * 32 + lane * 2 + k % 2] =
        static_cast<std::byte>((pattern >> 8 & 0x80) | (pattern & 0x7f));
    panel[kMap.codes + k / 2 * 16 + lane] |= static_cast<std::byte>(code << (k % 2 * 4));
    panel[kMap.bases + k / 128 * 16 + lane] = static_cast<std::byte>(base);
  }
  static Matrix matrix(const void* data) {
    return {data, kSize, kSize, DType::bfloat16, kBfloat12};
  }

  static constexpr Bfloat12Panel kMap = bfloat12_panel(kSize);
  std::vector<std::byte> panels;
  std::vector<std::uint16_t> bits;  // row-major
};

inline std::vector<PackedCase> packed_cases() {
  std::vector<PackedCase> cases;
  for (const DType dtype : kAllTypes) {
    for (const DType scales : kAllTypes) {
      for (const std::uint32_t zeros : {0U, 1U}) {
        cases.push_back({{Codes::int4, scales, 16, zeros}, dtype, 32, 50});
        cases.push_back({{Codes::int8, scales, 0, zeros}, dtype, 16, 33});
        cases.push_back({{Codes::int4, scales, 8, zeros, 1}, dtype, 64, 41, 2});
      }
      cases.push_back({{Codes::float8, scales, 128}, dtype, 32, 200});
    }
  }
  cases.push_back({{Codes::int8, DType::float16, 9, 1, 1}, DType::bfloat16, 32, 70, 2});
  // Many panels, passes over the inputs, and last inputs without a pair.
  cases.push_back({{Codes::int4, DType::bfloat16, 128}, DType::bfloat16, 144, 1300});
  cases.push_back({{Codes::int8, DType::bfloat16, 128}, DType::bfloat16, 144, 2049});
  cases.push_back({{Codes::int8, DType::bfloat16, 0}, DType::bfloat16, 80, 1037});
  cases.push_back({{Codes::int4, DType::bfloat16, 10}, DType::bfloat16, 128, 75});
  cases.push_back({{Codes::int8, DType::bfloat16, 128}, DType::bfloat16, 128, 300});
  // One input, an odd last one, groups that end within a pass, many panels.
  for (const std::int32_t cols : {1, 33, 131, 1030}) {
    cases.push_back({kBfloat12, DType::bfloat16, cols > 1000 ? 80 : 32, cols});
  }
  return cases;
}

}  // namespace poise::test
