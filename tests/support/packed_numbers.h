#pragma once
// What packed matrices mean, read one number at a time by the words of common/formats/packed_weights.h, and
// random ones. The oracle of everything that packs or unpacks.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <vector>

#include "common/dtype.h"
#include "common/formats/packed_weights.h"

namespace poise::test {

inline float stored_number(const std::byte* from, DType dtype) {
  if (dtype == DType::float32) {
    float value;
    std::memcpy(&value, from, sizeof value);
    return value;
  }
  std::uint16_t bits;
  std::memcpy(&bits, from, sizeof bits);
  return dtype == DType::float16 ? to_float(Half{bits}) : to_float(BFloat16{bits});
}

inline float number_rounded(float value, DType dtype) {
  return dtype == DType::float32   ? value
         : dtype == DType::float16 ? to_float(to_half(value))
                                   : to_float(to_bfloat16(value));
}

inline float float8_value(std::uint8_t bits) {
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  const double magnitude = exponent == 15 && mantissa == 7
                               ? std::numeric_limits<double>::quiet_NaN()
                           : exponent == 0 ? std::ldexp(mantissa, -9)
                                           : std::ldexp(8 + mantissa, exponent - 10);
  return static_cast<float>((bits & 0x80) != 0 ? -magnitude : magnitude);
}

// (rows, cols) row-major. `input_groups`: (parts, cols), where the format has them.
inline std::vector<float> unpacked_numbers(const PackedFormat& format, DType dtype,
                                           std::int32_t rows, std::int32_t cols,
                                           const std::byte* data,
                                           const std::vector<std::uint16_t>& input_groups = {}) {
  const std::int64_t groups = format.group == 0 ? 1 : (cols + format.group - 1) / format.group;
  const std::int64_t code_bytes = format.codes == Codes::int4 ? (cols + 1) / 2 * 16 : cols * 16;
  const std::int64_t scale_size = size_of(format.scale_dtype).n;
  const std::int64_t scale_bytes = groups * 16 * scale_size;
  const std::int64_t panel = code_bytes + scale_bytes + (format.zero_points != 0 ? groups * 16 : 0);
  const std::int64_t parts =
      input_groups.empty() ? 1 : static_cast<std::int64_t>(input_groups.size()) / cols;
  std::vector<float> values;
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::byte* at = data + row / 16 * panel;
    const std::int64_t lane = row % 16;
    for (std::int64_t k = 0; k < cols; ++k) {
      std::int64_t group = format.group == 0 ? 0 : k / format.group;
      if (!input_groups.empty()) {
        group = input_groups[static_cast<std::size_t>(row / (rows / parts) * cols + k)];
      }
      float code = 0;
      if (format.codes == Codes::int4) {
        const auto pair = static_cast<unsigned>(at[k / 2 * 16 + lane]);
        code = static_cast<float>(static_cast<int>(k % 2 == 0 ? pair & 15 : pair >> 4) - 8);
      } else if (format.codes == Codes::int8) {
        code = static_cast<float>(static_cast<std::int8_t>(at[k * 16 + lane]));
      } else {
        code = float8_value(static_cast<std::uint8_t>(at[k * 16 + lane]));
      }
      const float scale =
          stored_number(at + code_bytes + (group * 16 + lane) * scale_size, format.scale_dtype);
      const float zero = format.zero_points == 0
                             ? 0.0F
                             : static_cast<float>(static_cast<std::int8_t>(
                                   at[code_bytes + scale_bytes + group * 16 + lane]));
      values.push_back(number_rounded(scale * (code - zero), dtype));
    }
  }
  return values;
}

// Panels of any codes, with scales of about `scale` and every kind of zero point.
inline void fill_with_panels(const PackedFormat& format, std::int32_t cols, float scale,
                             std::mt19937& random, std::span<std::byte> panels) {
  const auto panel = static_cast<std::size_t>(packed_panel(format, cols).bytes.n);
  const auto scales = static_cast<std::size_t>(packed_panel(format, cols).scales);
  const auto zeros = static_cast<std::size_t>(packed_panel(format, cols).zeros);
  std::normal_distribution<float> normal(scale, scale / 4);
  for (std::size_t start = 0; start < panels.size(); start += panel) {
    const std::span<std::byte> one = panels.subspan(start, panel);
    for (std::byte& byte : one.first(scales)) {
      byte = static_cast<std::byte>(random());
      if (format.codes == Codes::float8 && (byte & std::byte{0x7f}) == std::byte{0x7f}) {
        byte = std::byte{0};  // not a number
      }
    }
    for (std::size_t at = scales; at < zeros;
         at += static_cast<std::size_t>(size_of(format.scale_dtype).n)) {
      const float value = normal(random);
      if (format.scale_dtype == DType::float32) {
        std::memcpy(one.data() + at, &value, 4);
      } else {
        const std::uint16_t bits =
            format.scale_dtype == DType::float16 ? to_half(value).bits : to_bfloat16(value).bits;
        std::memcpy(one.data() + at, &bits, 2);
      }
    }
    for (std::byte& zero : one.subspan(zeros)) {
      zero =
          static_cast<std::byte>(format.codes == Codes::int4 ? static_cast<int>(random() % 16) - 8
                                                             : static_cast<int>(random() % 256));
    }
  }
}

inline std::vector<std::uint16_t> some_input_groups(const PackedFormat& format, std::int32_t parts,
                                                    std::int32_t cols, std::mt19937& random) {
  std::vector<std::uint16_t> groups(static_cast<std::size_t>(parts) *
                                    static_cast<std::size_t>(cols));
  for (std::uint16_t& group : groups) {
    group = static_cast<std::uint16_t>(random() % static_cast<std::uint32_t>(format.groups(cols)));
  }
  return groups;
}

}  // namespace poise::test
