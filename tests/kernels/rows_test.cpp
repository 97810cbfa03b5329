// The operations that take rows one at a time.
#include <gtest/gtest.h>

#include "tests/kernels/tensors.h"

namespace poise::test {
namespace {

TEST(LayerNorm, CentersAndScalesEachRow) {
  cpu::Workers workers(2);
  for (const DType dtype : kAllTypes) {
    for (const std::int32_t dim : {1, 2, 15, 16, 17, 100, 768}) {
      for (const bool affine : {true, false}) {
        constexpr std::int32_t kRows = 5;
        const auto width = static_cast<std::size_t>(dim);
        std::vector<float> in = normal_values(1, kRows * width, 3);
        for (float& x : in) {
          x += 10;
        }
        const Stored weight(dtype, normal_values(2, width));
        const Stored bias(dtype, normal_values(3, width));
        Stored out(dtype, std::vector<float>(kRows * (width + 2), -7));
        const float epsilon = 1e-5f;
        cpu::layer_norm({.out = {out.data(), dtype, dim + 2},
                         .in = in.data(),
                         .weight = affine ? weight.data() : nullptr,
                         .bias = affine ? bias.data() : nullptr,
                         .dtype = dtype,
                         .rows = kRows,
                         .dim = dim,
                         .epsilon = epsilon},
                        workers);
        for (std::size_t r = 0; r < kRows; ++r) {
          double mean = 0;
          for (std::size_t c = 0; c < width; ++c) {
            mean += static_cast<double>(in[r * width + c]) / dim;
          }
          double variance = 0;
          for (std::size_t c = 0; c < width; ++c) {
            const double distance = static_cast<double>(in[r * width + c]) - mean;
            variance += distance * distance / dim;
          }
          const double deviation = std::sqrt(variance + static_cast<double>(epsilon));
          for (std::size_t c = 0; c < width; ++c) {
            const double w = affine ? static_cast<double>(weight[c]) : 1.0;
            const double b = affine ? static_cast<double>(bias[c]) : 0.0;
            const double scaled = (static_cast<double>(in[r * width + c]) - mean) / deviation * w;
            // The mean errs by dim/16 + 4 roundings of sums near 16·dim, divided by dim.
            const double mean_error = (dim / 16.0 + 6) * 0x1p-24 * 16;
            ASSERT_NEAR(static_cast<double>(out[r * (width + 2) + c]), scaled + b,
                        std::fabs(w) * mean_error / deviation +
                            std::fabs(scaled) * (dim / 16.0 + 12) * 0x1p-23 +
                            std::fabs(scaled + b) * rounding(dtype) + 1e-30)
                << "dim " << dim << " at " << r << ", " << c;
          }
          ASSERT_EQ(out[r * (width + 2) + width], -7.0f);
        }
      }
    }
  }
}

TEST(LayerNorm, GivesTheSameBitsOnEveryInstructionSetAndNumberOfRows) {
  constexpr std::int32_t kRows = 50;
  constexpr std::int32_t kDim = 1003;
  const std::vector<float> in = normal_values(4, kRows * kDim);
  const Stored weight(DType::float16, normal_values(5, kDim));
  const auto run = [&](std::int32_t part, cpu::Workers& workers) {
    Stored out(DType::float16, static_cast<std::size_t>(kRows * kDim));
    for (std::int32_t row = 0; row < kRows; row += part) {
      cpu::layer_norm(
          {.out = {static_cast<std::byte*>(out.data()) + row * kDim * 2, DType::float16, kDim},
           .in = in.data() + row * kDim,
           .weight = weight.data(),
           .dtype = DType::float16,
           .rows = std::min(part, kRows - row),
           .dim = kDim,
           .epsilon = 1e-5f},
          workers);
    }
    return out;
  };
  cpu::Workers one(1);
  const Stored expected = run(kRows, one);
  cpu::Workers workers(3);
  for (const cpu::Isa isa : cpu::available_isas()) {
    under(isa, [&] {
      EXPECT_EQ(run(kRows, workers), expected) << cpu::name_of(isa);
      EXPECT_EQ(run(7, workers), expected) << cpu::name_of(isa);
    });
  }
}

// Numbers of every kind: subnormal in half precision, halfway between two, too large, none.
std::vector<float> awkward_numbers() {
  std::vector<float> numbers = {0.0f,
                                -0.0f,
                                1.0f,
                                65504.0f,
                                65519.99f,
                                65520.0f,
                                -70000.0f,
                                6.1e-5f,
                                6.0e-8f,
                                2.9e-8f,
                                3.4e38f,
                                INFINITY,
                                -INFINITY,
                                std::nanf(""),
                                -std::nanf(""),
                                std::bit_cast<float>(0x7f800001u),
                                std::bit_cast<float>(0xffffffffu)};
  std::mt19937 random(11);
  while (numbers.size() < 20011) {
    numbers.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(random())));
    // In the range of half precision, and exactly between two of its numbers.
    const auto bits = static_cast<std::uint32_t>(random());
    numbers.push_back(std::bit_cast<float>((0x38000000u + bits % 0x0f800000u) | 0x1000u));
    numbers.push_back(std::bit_cast<float>(((0x38000000u + bits % 0x0f800000u) & ~0x1fffu) |
                                           0x1000u | (bits & 0x80000000u)));
  }
  return numbers;
}

TEST(Convert, RoundsAsTheTypesThemselvesDoToTheBit) {
  cpu::Workers workers(2);
  const std::vector<float> in = awkward_numbers();
  const auto dim = static_cast<std::int32_t>(in.size());
  for (const cpu::Isa isa : cpu::available_isas()) {
    for (const DType dtype : kAllTypes) {
      const Stored expected(dtype, in);
      Stored out(dtype, in.size());
      under(isa, [&] {
        cpu::convert({.out = {out.data(), dtype, dim}, .in = in.data(), .rows = 1, .dim = dim},
                     workers);
      });
      EXPECT_EQ(out, expected) << cpu::name_of(isa) << " " << name_of(dtype);
    }
  }
}

TEST(EmbedTokens, GathersColumnsOfThePackedTable) {
  cpu::Workers workers(2);
  for (const DType dtype : kAllTypes) {
    for (const std::int32_t dim : {1, 16, 33}) {
      const Stored table(dtype, normal_values(6, static_cast<std::size_t>(37 * dim)));
      const PackedWeight packed(table, 37, dim);
      const std::vector<std::int32_t> tokens = {0, 36, 15, 16, 17, 36, 31};
      std::vector<float> out(tokens.size() * static_cast<std::size_t>(dim));
      cpu::embed_tokens(
          {out.data(), tokens.data(), packed.matrix(), static_cast<std::int32_t>(tokens.size())},
          workers);
      for (std::size_t r = 0; r < tokens.size(); ++r) {
        for (std::size_t c = 0; c < static_cast<std::size_t>(dim); ++c) {
          ASSERT_EQ(out[r * static_cast<std::size_t>(dim) + c],
                    table[static_cast<std::size_t>(tokens[r] * dim) + c]);
        }
      }
    }
  }
}

TEST(AddPositions, AddsTheRowAtPositionAndOffset) {
  cpu::Workers workers(2);
  for (const DType dtype : kAllTypes) {
    constexpr std::int32_t kDim = 35;
    const Stored table(dtype, normal_values(7, 12 * kDim));
    const std::vector<float> before = normal_values(8, 4 * kDim);
    std::vector<float> inout = before;
    const std::vector<std::int32_t> positions = {0, 9, 3, 3};
    cpu::add_positions({inout.data(), positions.data(), table.data(), dtype, 4, kDim, 2}, workers);
    for (std::size_t r = 0; r < 4; ++r) {
      for (std::size_t c = 0; c < kDim; ++c) {
        const auto at = static_cast<std::size_t>(positions[r] + 2) * kDim + c;
        ASSERT_EQ(inout[r * kDim + c], before[r * kDim + c] + table[at]);
      }
    }
  }
}

TEST(ScatterRows, MovesEachRowToItsPlace) {
  cpu::Workers workers(2);
  for (const std::int64_t row_bytes : {2, 6, 64, 3000}) {
    std::mt19937 random(9);
    std::vector<std::byte> in(static_cast<std::size_t>(100 * row_bytes));
    for (std::byte& b : in) {
      b = static_cast<std::byte>(random());
    }
    std::vector<std::byte> out(static_cast<std::size_t>(200 * row_bytes), std::byte{1});
    std::vector<RowMove> moves;
    std::vector<std::byte> expected = out;
    for (std::int64_t i = 0; i < 90; ++i) {
      moves.push_back({.from = (i * 7) % 100, .to = (i * 31 + 5) % 200});
      std::copy_n(in.begin() + moves.back().from * row_bytes, row_bytes,
                  expected.begin() + moves.back().to * row_bytes);
    }
    cpu::scatter_rows({out.data(), in.data(), moves.data(), row_bytes, 90}, workers);
    EXPECT_EQ(out, expected);
  }
}

}  // namespace
}  // namespace poise::test
