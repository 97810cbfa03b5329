#pragma once
// What packed matrices mean, read one number at a time by the words of common/formats/packed_weights.h, and
// random ones. The oracle of everything that packs or unpacks.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
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

// The weights of bfloat12 panels, (rows, cols) row-major, by the words of common/formats/bfloat12.h.
inline std::vector<std::uint16_t> bfloat12_bits(std::int32_t rows, std::int32_t cols,
                                                const std::byte* data) {
  const std::int64_t codes = (cols + 1) / 2 * 32, bases = codes + codes / 2;
  const std::int64_t escapes = bases + (cols + 127) / 128 * 16;
  const std::int64_t room = (cols / 16 + 8 + 3) / 4 * 4, panel = escapes + room * 4;
  std::vector<std::uint16_t> result;
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::byte* at = data + row / 16 * panel;
    const std::int64_t lane = row % 16;
    for (std::int64_t k = 0; k < cols; ++k) {
      const auto rest = static_cast<unsigned>(at[k / 2 * 32 + lane * 2 + k % 2]);
      const auto pair = static_cast<unsigned>(at[codes + k / 2 * 16 + lane]);
      const unsigned code = k % 2 == 0 ? pair & 15 : pair >> 4;
      unsigned exponent =
          code == 15 ? 0 : static_cast<unsigned>(at[bases + k / 128 * 16 + lane]) - code;
      for (std::int64_t i = 0; code == 14 && i < room; ++i) {
        std::uint32_t escape;
        std::memcpy(&escape, at + escapes + i * 4, 4);
        if (escape >> 12 == k && (escape >> 8 & 15) == lane) {
          exponent = escape & 255;
        }
      }
      result.push_back(
          static_cast<std::uint16_t>((rest & 0x80) << 8 | exponent << 7 | (rest & 0x7f)));
    }
  }
  return result;
}

// Any numbers of a few sizes, among them zeros and some escapes.
inline void fill_with_bfloat12(std::int32_t cols, std::mt19937& random,
                               std::span<std::byte> panels) {
  const Bfloat12Panel map = bfloat12_panel(cols);
  const auto size = static_cast<std::size_t>(map.bytes.n);
  for (std::size_t start = 0; start < panels.size(); start += size) {
    std::byte* const panel = panels.data() + start;
    for (std::int64_t at = 0; at < map.codes; ++at) {
      panel[at] = static_cast<std::byte>(random());
    }
    for (std::int64_t at = map.codes; at < map.bases; ++at) {
      const auto code = [&] { return random() % 8 == 0 ? 15 : random() % 14; };
      panel[at] = static_cast<std::byte>(code() | code() << 4);
    }
    for (std::int64_t at = map.bases; at < map.escapes; ++at) {
      panel[at] = static_cast<std::byte>(118 + random() % 8);
    }
    std::vector<std::uint32_t> places(static_cast<std::size_t>(cols) * 16);
    std::iota(places.begin(), places.end(), 0U);
    std::shuffle(places.begin(), places.end(), random);
    places.resize(std::min(places.size(), static_cast<std::size_t>(map.room) - random() % 2));
    std::sort(places.begin(), places.end());
    std::vector<std::uint32_t> escapes;
    for (const std::uint32_t place : places) {
      const std::uint32_t input = place / 16, row = place % 16;
      escapes.push_back(input << 12 | row << 8 | (90 + random() % 45));
      std::byte& pair = panel[map.codes + input / 2 * 16 + row];
      pair = input % 2 == 0 ? (pair & std::byte{0xf0}) | std::byte{14}
                            : (pair & std::byte{15}) | std::byte{14 << 4};
    }
    escapes.resize(static_cast<std::size_t>(map.room), 0xffffffffu);
    std::memcpy(panel + map.escapes, escapes.data(), escapes.size() * 4);
  }
}

// (rows, cols) row-major. `input_groups`: (parts, cols), where the format has them.
inline std::vector<float> unpacked_numbers(const PackedFormat& format, DType dtype,
                                           std::int32_t rows, std::int32_t cols,
                                           const std::byte* data,
                                           const std::vector<std::uint16_t>& input_groups = {}) {
  std::vector<float> values;
  if (format.codes == Codes::bfloat12) {
    for (const std::uint16_t bits : bfloat12_bits(rows, cols, data)) {
      values.push_back(to_float(BFloat16{bits}));
    }
    return values;
  }
  const std::int64_t groups = format.group == 0 ? 1 : (cols + format.group - 1) / format.group;
  const std::int64_t code_bytes = format.codes == Codes::int4 ? (cols + 1) / 2 * 16 : cols * 16;
  const std::int64_t scale_size = size_of(format.scale_dtype).n;
  const std::int64_t scale_bytes = groups * 16 * scale_size;
  const std::int64_t panel = code_bytes + scale_bytes + (format.zero_points != 0 ? groups * 16 : 0);
  const std::int64_t parts =
      input_groups.empty() ? 1 : static_cast<std::int64_t>(input_groups.size()) / cols;
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
  if (format.codes == Codes::bfloat12) {
    fill_with_bfloat12(cols, random, panels);
    return;
  }
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
