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
  cases.push_back({{Codes::int4, DType::bfloat16, 128}, DType::bfloat16, 144, 1300});
  return cases;
}

}  // namespace poise::test
