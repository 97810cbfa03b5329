#pragma once
// The definition of quantised keys and values (common/formats/kv_format.h) once more, number by number and with
// float64 in between: what float64 makes of two float32 and rounds to float32 is the float32 operation.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "common/formats/kv_format.h"
#include "tests/kernels/tensors.h"

namespace poise::test {

struct KvShape {
  std::int32_t kv_heads, head_dim;
  DType dtype;
  KvFormat format;

  std::size_t numbers() const { return 2 * static_cast<std::size_t>(kv_heads * head_dim); }
  KvRowLayout layout() const { return kv_row_layout(kv_heads, head_dim, dtype, format); }
};

// The smallest number of the type that is not below x ≥ 0. The bits of numbers from 0 on ascend as they do.
inline float next_stored(DType dtype, float x) {
  if (dtype == DType::float32) {
    return x;
  }
  const auto number = [&](int bits) {
    const auto pattern = static_cast<std::uint16_t>(bits);
    return dtype == DType::float16 ? to_float(Half{pattern}) : to_float(BFloat16{pattern});
  };
  int below = -1, not_below = dtype == DType::float16 ? 0x7c00 : 0x7f80;
  while (not_below - below > 1) {
    const int middle = (below + not_below) / 2;
    (number(middle) < x ? below : not_below) = middle;
  }
  return number(not_below);
}

// Row `row` of `kv`, (rows, 2, kv_heads, head_dim), as a KV block keeps it.
inline std::vector<std::byte> quantized_row(const Stored& kv, std::size_t row,
                                            const KvShape& shape) {
  const KvRowLayout layout = shape.layout();
  const auto size = static_cast<std::size_t>(size_of(shape.dtype).n);
  std::vector<std::byte> out(static_cast<std::size_t>(layout.row));
  for (std::int32_t head = 0; head < 2 * shape.kv_heads; ++head) {
    for (std::int32_t first = 0; first < shape.head_dim; first += kKvGroup) {
      const std::int32_t end = std::min(first + kKvGroup, shape.head_dim);
      std::vector<float> x;
      for (std::int32_t d = first; d < end; ++d) {
        x.push_back(
            kv[row * shape.numbers() + static_cast<std::size_t>(head * shape.head_dim + d)]);
      }
      const bool finite = std::ranges::all_of(x, [](float one) { return std::isfinite(one); });
      const double least = *std::ranges::min_element(x), most = *std::ranges::max_element(x);
      const auto range = static_cast<float>(most - least);
      Stored group(shape.dtype, 2);  // scale, offset
      if (finite && std::isfinite(range)) {
        const double levels = kv_levels(shape.format);
        group.set(
            0, next_stored(shape.dtype, static_cast<float>(static_cast<double>(range) / levels)));
        group.set(1, least == 0 ? 0.0f : static_cast<float>(least));
      } else {
        group.set(0, std::numeric_limits<float>::quiet_NaN());
        group.set(1, std::numeric_limits<float>::quiet_NaN());
      }
      for (std::int32_t d = first; d < end; ++d) {
        int code = 0;
        if (group[0] > 0) {
          const auto above =
              static_cast<float>(static_cast<double>(x[static_cast<std::size_t>(d - first)]) -
                                 static_cast<double>(group[1]));
          const auto steps =
              static_cast<float>(static_cast<double>(above) / static_cast<double>(group[0]));
          code = std::min(static_cast<int>(std::nearbyint(steps)), kv_levels(shape.format));
        }
        const auto at = static_cast<std::size_t>(head * layout.codes);
        const auto place = static_cast<std::size_t>(d);
        if (shape.format == KvFormat::int8) {
          out[at + place] = static_cast<std::byte>(code);
        } else {
          out[at + place / 2] |= static_cast<std::byte>(code << (place % 2 * 4));
        }
      }
      const auto of_group = static_cast<std::size_t>(head * layout.groups + first / kKvGroup);
      std::memcpy(out.data() + static_cast<std::size_t>(layout.groups_at) + of_group * 2 * size,
                  group.data(), 2 * size);
    }
  }
  return out;
}

// The numbers that such a row stands for: (2, kv_heads, head_dim).
inline Stored numbers_of(const std::byte* row, const KvShape& shape) {
  const KvRowLayout layout = shape.layout();
  const auto size = static_cast<std::size_t>(size_of(shape.dtype).n);
  Stored out(shape.dtype, shape.numbers());
  for (std::int32_t head = 0; head < 2 * shape.kv_heads; ++head) {
    for (std::int32_t d = 0; d < shape.head_dim; ++d) {
      const auto place = static_cast<std::size_t>(d);
      const auto at = static_cast<std::size_t>(head * layout.codes);
      const int code = shape.format == KvFormat::int8
                           ? static_cast<int>(row[at + place])
                           : static_cast<int>(row[at + place / 2]) >> (place % 2 * 4) & 15;
      Stored group(shape.dtype, 2);
      const auto of_group = static_cast<std::size_t>(head * layout.groups + d / kKvGroup);
      std::memcpy(group.data(),
                  row + static_cast<std::size_t>(layout.groups_at) + of_group * 2 * size, 2 * size);
      out.set(static_cast<std::size_t>(head * shape.head_dim + d),
              std::fma(static_cast<float>(code), group[0], group[1]));
    }
  }
  return out;
}

// Rows whose groups are of every kind: numbers of many sizes, constant ones, zeros of both signs, the
// smallest and the largest of the type, and some that are not finite.
inline Stored varied_kv(std::size_t rows, const KvShape& shape, std::uint32_t seed) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  Stored kv(shape.dtype, normal_values(seed, rows * shape.numbers()));
  std::mt19937 random(seed + 1);
  const auto dim = static_cast<std::size_t>(shape.head_dim);
  for (std::size_t first = 0; first < kv.size(); first += std::min<std::size_t>(dim, kKvGroup)) {
    const std::size_t end = std::min(first + std::min<std::size_t>(dim, kKvGroup), kv.size());
    const auto all = [&](auto change) {
      for (std::size_t i = first; i < end; ++i) {
        kv.set(i, change(kv[i]));
      }
    };
    switch (random() % 12) {
      case 0:
        all([](float) { return -1.7f; });
        break;
      case 1:
        all([&](float) { return random() % 2 == 0 ? 0.0f : -0.0f; });
        break;
      case 2:
        all([](float x) { return x * 0x1p-24f; });
        break;
      case 3:
        all([](float x) { return 100 + x * 0x1p-6f; });
        break;
      case 4:
        all([](float x) { return x * 1e4f; });
        break;
      case 5:
        kv.set(first + random() % (end - first), kInfinity);
        break;
      case 6:
        kv.set(first + random() % (end - first), std::numeric_limits<float>::quiet_NaN());
        break;
      case 7:
        all([&](float x) { return x < 0 ? -3e38f : 3e38f; });  // infinite in float16
        break;
      default:
        break;
    }
  }
  return kv;
}

}  // namespace poise::test
