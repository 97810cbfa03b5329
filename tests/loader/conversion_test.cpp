#include "loader/conversion.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

namespace poise {
namespace {

constexpr DType kTypes[] = {DType::float32, DType::float16, DType::bfloat16};

template <typename T>
std::vector<std::byte> bytes_of(const std::vector<T>& values) {
  std::vector<std::byte> bytes(values.size() * sizeof(T));
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

// Every 16-bit pattern; and of the 32-bit ones those where rounding turns, and random ones.
std::vector<std::byte> all_patterns(DType type) {
  if (type != DType::float32) {
    std::vector<std::uint16_t> patterns(1 << 16);
    for (std::size_t i = 0; i < patterns.size(); ++i) {
      patterns[i] = static_cast<std::uint16_t>(i);
    }
    return bytes_of(patterns);
  }
  std::vector<std::uint32_t> patterns;
  std::mt19937 random(11);
  for (std::uint32_t high = 0; high < 1 << 16; ++high) {
    for (const std::uint32_t low :
         {0x0u, 0x1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu, 0x0fffu, 0x1000u, 0x1001u, 0x3000u,
          static_cast<std::uint32_t>(random()) & 0xffffu}) {
      patterns.push_back(high << 16 | low);
    }
  }
  patterns.resize(patterns.size() - 3);  // no multiple of eight
  return bytes_of(patterns);
}

float value_at(DType type, const std::vector<std::byte>& bytes, std::size_t i) {
  if (type == DType::float32) {
    float x = 0;
    std::memcpy(&x, bytes.data() + 4 * i, 4);
    return x;
  }
  std::uint16_t bits = 0;
  std::memcpy(&bits, bytes.data() + 2 * i, 2);
  return type == DType::float16 ? to_float(Half{bits}) : to_float(BFloat16{bits});
}

TEST(Conversion, TheWideLoopsGiveWhatTheDefinitionGives) {
  for (const DType from : kTypes) {
    const std::vector<std::byte> in = all_patterns(from);
    const std::size_t count = in.size() / static_cast<std::size_t>(size_of(from).n);
    for (const DType to : kTypes) {
      SCOPED_TRACE(testing::Message() << name_of(from) << " to " << name_of(to));
      std::vector<std::byte> fast(count * static_cast<std::size_t>(size_of(to).n));
      std::vector<std::byte> plain(fast.size());
      convert(from, in, to, fast);
      detail::convert_scalar(from, in, to, plain);
      const auto width = static_cast<std::size_t>(size_of(to).n);
      for (std::size_t i = 0; i < count; ++i) {
        const bool same = std::memcmp(&fast[i * width], &plain[i * width], width) == 0;
        const bool both_nan =
            std::isnan(value_at(to, fast, i)) && std::isnan(value_at(to, plain, i));
        ASSERT_TRUE(same || both_nan) << i << ": " << value_at(from, in, i);
      }
    }
  }
}

TEST(Conversion, AWiderTypeAndBackIsTheSameNumber) {
  for (const DType narrow : {DType::float16, DType::bfloat16}) {
    const std::vector<std::byte> in = all_patterns(narrow);
    std::vector<std::byte> wide(in.size() * 2);
    std::vector<std::byte> back(in.size());
    convert(narrow, in, DType::float32, wide);
    convert(DType::float32, wide, narrow, back);
    for (std::size_t i = 0; i < in.size() / 2; ++i) {
      const float x = value_at(narrow, in, i);
      ASSERT_TRUE(std::memcmp(&in[2 * i], &back[2 * i], 2) == 0 || std::isnan(x)) << x;
    }
  }
}

TEST(Conversion, RoundingIsToNearestEven) {
  const std::vector<float> in{1.0F + 0x1p-11F, 1.0F + 3 * 0x1p-11F, 65519.0F, 65520.0F, -0.0F,
                              0x1p-25F,        0x1.8p-25F,          1e30F,    -1e30F};
  const std::vector<float> expected{1.0F, 1.0F + 0x1p-9F, 65504.0F, INFINITY, -0.0F,
                                    0.0F, 0x1p-24F,       INFINITY, -INFINITY};
  std::vector<std::byte> out(in.size() * 2);
  convert(DType::float32, bytes_of(in), DType::float16, out);
  for (std::size_t i = 0; i < in.size(); ++i) {
    EXPECT_EQ(value_at(DType::float16, out, i), expected[i]) << in[i];
  }
  EXPECT_TRUE(std::signbit(value_at(DType::float16, out, 4)));
}

}  // namespace
}  // namespace poise
