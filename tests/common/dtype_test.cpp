#include "common/dtype.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace poise {
namespace {

TEST(DTypeTest, EveryHalfComesBackThroughFloat) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const Half half{static_cast<std::uint16_t>(bits)};
    const float value = to_float(half);
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(to_float(to_half(value))));
    } else {
      EXPECT_EQ(to_half(value).bits, half.bits);
    }
  }
}

// The nearest of two neighbours, ties to the even one, is what rounding means.
TEST(DTypeTest, HalfRoundsToNearestEven) {
  for (std::uint32_t bits = 0; bits < 0x7bff; ++bits) {
    const float low = to_float(Half{static_cast<std::uint16_t>(bits)});
    const float high = to_float(Half{static_cast<std::uint16_t>(bits + 1)});
    const float middle = low + (high - low) / 2;
    const std::uint32_t even = bits % 2 == 0 ? bits : bits + 1;
    EXPECT_EQ(to_half(middle).bits, even);
    EXPECT_EQ(to_half(std::nextafter(middle, 0.0f)).bits, bits);
    EXPECT_EQ(to_half(std::nextafter(middle, 1e9f)).bits, bits + 1);
    EXPECT_EQ(to_half(-middle).bits, even | 0x8000);
  }
}

TEST(DTypeTest, HalfOverflowsToInfinity) {
  EXPECT_EQ(to_half(65504.0f).bits, 0x7bff);
  EXPECT_EQ(to_half(65519.99f).bits, 0x7bff);
  EXPECT_EQ(to_half(65520.0f).bits, 0x7c00);
  EXPECT_EQ(to_half(-std::numeric_limits<float>::infinity()).bits, 0xfc00);
}

TEST(DTypeTest, EveryBFloat16ComesBackThroughFloat) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const BFloat16 brain{static_cast<std::uint16_t>(bits)};
    const float value = to_float(brain);
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(to_float(to_bfloat16(value))));
    } else {
      EXPECT_EQ(to_bfloat16(value).bits, brain.bits);
    }
  }
}

TEST(DTypeTest, BFloat16RoundsToNearestEven) {
  EXPECT_EQ(to_bfloat16(std::bit_cast<float>(0x3f808000u)).bits, 0x3f80);
  EXPECT_EQ(to_bfloat16(std::bit_cast<float>(0x3f818000u)).bits, 0x3f82);
  EXPECT_EQ(to_bfloat16(std::bit_cast<float>(0x3f808001u)).bits, 0x3f81);
  EXPECT_EQ(to_bfloat16(std::bit_cast<float>(0x7f7fffffu)).bits, 0x7f80);
}

TEST(DTypeTest, NamesOfFilesFlagsAndHeadersAreUnderstood) {
  EXPECT_EQ(dtype_from("torch.float16"), DType::float16);
  EXPECT_EQ(dtype_from("BF16"), DType::bfloat16);
  EXPECT_EQ(dtype_from("float"), DType::float32);
  EXPECT_EQ(dtype_from("int8"), std::nullopt);
  for (const DType type : {DType::float32, DType::float16, DType::bfloat16}) {
    EXPECT_EQ(dtype_from(name_of(type)), type);
  }
}

}  // namespace
}  // namespace poise
