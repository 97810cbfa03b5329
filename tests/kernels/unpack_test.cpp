// Packed matrices: their numbers, and products with them, have the bits of the definition in
// common/formats/packed_weights.h under every instruction set.

#include <gtest/gtest.h>

#include <bit>
#include <string>

#include "tests/kernels/packed_operands.h"

namespace poise::test {
namespace {

// One tile of rows, two of different sizes, several.
void expect_products_of_numbers(const PackedOperand& operand, const std::string& name) {
  const PackedCase& c = operand.test;
  cpu::Workers workers(2);
  const PackedWeight plain(Stored(c.dtype, operand.numbers), c.rows, c.cols);
  for (const std::int64_t rows : {1, 3, 7, 13, 30}) {
    const std::vector<float> in = normal_values(7, static_cast<std::size_t>(rows * c.cols));
    const Stored bias(c.dtype, normal_values(8, static_cast<std::size_t>(c.rows)));
    const auto product = [&](const Matrix& weight) {
      std::vector<float> out(static_cast<std::size_t>(rows * c.rows));
      cpu::gemm({.out = {out.data(), DType::float32, c.rows},
                 .in = {const_cast<float*>(in.data()), DType::float32, c.cols},
                 .weight = weight,
                 .bias = bias.data(),
                 .residual = nullptr,
                 .rows = rows,
                 .epilogue = Epilogue::silu},
                workers);
      return out;
    };
    const std::vector<float> expected = product(plain.matrix());
    for (const cpu::Isa isa : cpu::available_isas()) {
      under(isa, [&] {
        EXPECT_TRUE(same_bits(product(operand.matrix()), expected)) << name << ", " << rows;
      });
    }
  }
}

TEST(Unpack, GivesTheNumbersOfTheDefinitionUnderEveryInstructionSet) {
  cpu::Workers workers(2);
  for (const PackedCase& c : packed_cases()) {
    const PackedOperand operand(c);
    const PackedWeight expected(Stored(c.dtype, operand.numbers), c.rows, c.cols);
    for (const cpu::Isa isa : cpu::available_isas()) {
      under(isa, [&] {
        std::vector<std::byte> out(static_cast<std::size_t>(c.rows) *
                                   static_cast<std::size_t>(c.cols * size_of(c.dtype).n));
        cpu::unpack({.out = out.data(), .weight = operand.matrix()}, workers);
        EXPECT_EQ(std::memcmp(out.data(), expected.matrix().data, out.size()), 0) << name_of(c);
      });
    }
  }
}

TEST(Unpack, AProductWithPackedWeightsHasTheBitsOfTheProductWithTheirNumbers) {
  for (const PackedCase& c : packed_cases()) {
    expect_products_of_numbers(PackedOperand(c), name_of(c));
  }
}

// One panel that is not rounded quickly, beside some that are.
TEST(Unpack, AScaleBelowZeroChangesNoBitsOfAProduct) {
  for (const Codes codes : {Codes::int4, Codes::int8}) {
    const PackedCase c{{codes, DType::bfloat16, 128}, DType::bfloat16, 144, 400};
    PackedOperand operand(c);
    const PackedPanel map = packed_panel(c.format, c.cols);
    const BFloat16 scale = to_bfloat16(-0.02F);
    std::memcpy(operand.panels.data() + 5 * map.bytes.n + map.scales + (3 * 16 + 7) * 2, &scale, 2);
    operand.numbers = unpacked_numbers(c.format, c.dtype, c.rows, c.cols, operand.panels.data());
    expect_products_of_numbers(operand, name_of(c));
  }
}

TEST(Unpack, ScalesThatAreNotFiniteAndSubnormalNumbersAreRoundedAsAnyOther) {
  cpu::Workers workers(1);
  for (const DType dtype : kAllTypes) {
    PackedOperand operand({{Codes::int8, DType::float32, 8}, dtype, 16, 64});
    const float scales[] = {1e-8F,  3e38F, std::numeric_limits<float>::infinity(),  1e-40F,
                            -0.25F, 0.0F,  std::numeric_limits<float>::quiet_NaN(), 5e-6F};
    for (std::size_t group = 0; group < 8; ++group) {
      for (std::size_t row = 0; row < 16; ++row) {
        std::memcpy(operand.panels.data() + 64 * 16 + (group * 16 + row) * 4, &scales[group], 4);
      }
    }
    const Stored expected(
        dtype, unpacked_numbers(operand.test.format, dtype, 16, 64, operand.panels.data()));
    const PackedWeight panels(expected, 16, 64);
    for (const cpu::Isa isa : cpu::available_isas()) {
      under(isa, [&] {
        Stored out(dtype, std::size_t{16} * 64);
        cpu::unpack({.out = out.data(), .weight = operand.matrix()}, workers);
        for (std::size_t k = 0; k < 64; ++k) {
          for (std::size_t row = 0; row < 16; ++row) {
            const float want = expected[row * 64 + k], got = out[k * 16 + row];
            EXPECT_TRUE(std::isnan(want) ? std::isnan(got) : want == got) << k << " " << row;
          }
        }
      });
    }
  }
}

// Every bfloat16 mantissa as a scale, also at the ends of the range of the quick rounding and below 0,
// by every difference of a code and a zero point.
TEST(Unpack, EveryCodeByEveryMantissaOfAScaleIsRoundedHalfToEven) {
  cpu::Workers workers(1);
  constexpr std::int32_t kRows = 7 * 128, kCols = 256;
  constexpr float kPowers[] = {0x1p-133F, 0x1p-61F, 0x1p-60F, 0x1p-9F, 0x1p59F, 0x1p60F, -0x1p-3F};
  const PackedFormat format{Codes::int8, DType::bfloat16, 0, 1};
  std::int32_t ties = 0;
  for (const std::int32_t zero : {-128, 0, 127}) {
    PackedOperand operand({format, DType::bfloat16, kRows, kCols});
    const PackedPanel map = packed_panel(format, kCols);
    std::vector<float> expected(std::size_t{kRows} * kCols);
    for (std::int32_t row = 0; row < kRows; ++row) {
      std::byte* panel = operand.panels.data() + row / 16 * map.bytes.n;
      const std::int32_t lane = row % 16;
      const BFloat16 scale =
          to_bfloat16(kPowers[row / 128] * (1 + static_cast<float>(row % 128) / 128));
      std::memcpy(panel + map.scales + lane * 2, &scale, 2);
      panel[map.zeros + lane] = static_cast<std::byte>(zero);
      for (std::int32_t k = 0; k < kCols; ++k) {
        panel[k * 16 + lane] = static_cast<std::byte>(k - 128);
        const float exact = to_float(scale) * static_cast<float>(k - 128 - zero);
        ties += (std::bit_cast<std::uint32_t>(exact) & 0xffff) == 0x8000 ? 1 : 0;
        expected[static_cast<std::size_t>(row * kCols + k)] = to_float(to_bfloat16(exact));
      }
    }
    const PackedWeight panels(Stored(DType::bfloat16, expected), kRows, kCols);
    for (const cpu::Isa isa : cpu::available_isas()) {
      under(isa, [&] {
        std::vector<std::byte> out(expected.size() * 2);
        cpu::unpack({.out = out.data(), .weight = operand.matrix()}, workers);
        EXPECT_EQ(std::memcmp(out.data(), panels.matrix().data, out.size()), 0) << zero;
      });
    }
  }
  EXPECT_GT(ties, 10'000);
}

TEST(Unpack, EveryBfloat16ComesOutOfBfloat12WithItsOwnBits) {
  const EveryBfloat16 every;
  constexpr std::int32_t kSize = EveryBfloat16::kSize;
  cpu::Workers workers(1);
  std::vector<std::uint16_t> plain(every.bits.size()), out(every.bits.size());
  cpu::pack_matrix(plain.data(), every.bits.data(), kSize, kSize, DType::bfloat16);
  for (const cpu::Isa isa : cpu::available_isas()) {
    under(isa, [&] {
      cpu::unpack({.out = out.data(), .weight = every.matrix(every.panels.data())}, workers);
      EXPECT_EQ(out, plain);
    });
  }
}

}  // namespace
}  // namespace poise::test
