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

TEST(RmsNorm, DividesEachRowByTheRootOfItsMeanSquare) {
  cpu::Workers workers(2);
  for (const DType dtype : kAllTypes) {
    for (const std::int32_t dim : {1, 2, 15, 16, 17, 100, 768}) {
      constexpr std::int32_t kRows = 5;
      const auto width = static_cast<std::size_t>(dim);
      const std::vector<float> in = normal_values(1, kRows * width, 3);
      const Stored weight(dtype, normal_values(2, width));
      Stored out(dtype, std::vector<float>(kRows * (width + 2), -7));
      const float epsilon = 1e-2f;
      cpu::rms_norm({.out = {out.data(), dtype, dim + 2},
                     .in = in.data(),
                     .weight = weight.data(),
                     .dtype = dtype,
                     .rows = kRows,
                     .dim = dim,
                     .epsilon = epsilon},
                    workers);
      for (std::size_t r = 0; r < kRows; ++r) {
        double squares = 0;
        for (std::size_t c = 0; c < width; ++c) {
          squares += std::pow(static_cast<double>(in[r * width + c]), 2) / dim;
        }
        const double root = std::sqrt(squares + static_cast<double>(epsilon));
        for (std::size_t c = 0; c < width; ++c) {
          const double expected =
              static_cast<double>(in[r * width + c]) / root * static_cast<double>(weight[c]);
          // A sum of positive numbers errs by its dim/16 + 4 roundings, its root by half of that.
          ASSERT_NEAR(
              static_cast<double>(out[r * (width + 2) + c]), expected,
              std::fabs(expected) * ((dim / 16.0 + 10) * 0x1p-24 + rounding(dtype)) + 0x1p-25)
              << "dim " << dim << " at " << r << ", " << c;
        }
        ASSERT_EQ(out[r * (width + 2) + width], -7.0f);
      }
    }
  }
}

// Three heads in rows of [K V], as the pipeline has them: V must stay.
struct RotateCase {
  std::int32_t head_dim, rotary_dim;
  bool norm;
};
constexpr std::int32_t kRotatedHeads = 3;
constexpr float kRotateEpsilon = 1e-6f;
const std::vector<std::int32_t> kRotatePositions = {0, 1, 2, 17, 599, 4095, 131071, 1048575};

std::vector<float> rotate_frequencies(std::int32_t pairs) {
  std::vector<float> table;
  for (const double base : {10000.0, 500000.0}) {
    for (std::int32_t i = 0; i < pairs; ++i) {
      table.push_back(static_cast<float>(std::pow(base, -static_cast<double>(i) / pairs)));
    }
  }
  return table;
}

std::vector<RotaryPlace> rotate_places() {
  std::vector<RotaryPlace> places;
  for (const std::int32_t position : kRotatePositions) {
    places.push_back({.position = position, .frequencies = position % 2});
  }
  return places;
}

Stored rotated(const RotateCase& c, const Stored& rows, const Stored& norm, DType dtype,
               std::int32_t part, cpu::Workers& workers) {
  Stored inout = rows;
  const std::vector<float> table = rotate_frequencies(c.rotary_dim / 2);
  const std::vector<RotaryPlace> places = rotate_places();
  const std::int64_t stride = 2 * kRotatedHeads * c.head_dim;
  const auto count = static_cast<std::int32_t>(places.size());
  for (std::int32_t row = 0; row < count; row += part) {
    cpu::rotate({.inout = {static_cast<std::byte*>(inout.data()) + row * stride * size_of(dtype).n,
                           dtype, stride},
                 .places = places.data() + row,
                 .frequencies = table.data(),
                 .norm_weight = c.norm ? norm.data() : nullptr,
                 .dtype = dtype,
                 .rows = std::min(part, count - row),
                 .heads = kRotatedHeads,
                 .head_dim = c.head_dim,
                 .rotary_dim = c.rotary_dim,
                 .scale = 1.25f,
                 .epsilon = kRotateEpsilon},
                workers);
  }
  return inout;
}

TEST(Rotate, TurnsEachPairByItsAngleAfterTheNorm) {
  cpu::Workers workers(2);
  for (const DType dtype : kAllTypes) {
    for (const RotateCase& c :
         {RotateCase{2, 2, false}, RotateCase{8, 8, true}, RotateCase{20, 20, false},
          RotateCase{36, 20, true}, RotateCase{64, 64, true}, RotateCase{128, 128, false},
          RotateCase{80, 32, false}, RotateCase{256, 256, true}, RotateCase{7, 0, true}}) {
      const std::size_t rows = kRotatePositions.size();
      const auto dim = static_cast<std::size_t>(c.head_dim);
      const auto pairs = static_cast<std::size_t>(c.rotary_dim / 2);
      const std::size_t stride = 2 * kRotatedHeads * dim;
      const Stored before(dtype, normal_values(3, rows * stride));
      const Stored norm(dtype, normal_values(4, dim));
      const Stored after =
          rotated(c, before, norm, dtype, static_cast<std::int32_t>(rows), workers);
      const std::vector<float> table = rotate_frequencies(c.rotary_dim / 2);
      for (std::size_t r = 0; r < rows; ++r) {
        const float* frequencies =
            table.data() + static_cast<std::size_t>(kRotatePositions[r] % 2) * pairs;
        for (std::size_t head = 0; head < 2 * kRotatedHeads; ++head) {
          const std::size_t at = r * stride + head * dim;
          if (head >= kRotatedHeads) {  // V
            for (std::size_t d = 0; d < dim; ++d) {
              ASSERT_EQ(after[at + d], before[at + d]);
            }
            continue;
          }
          std::vector<double> x(dim);
          double squares = 0;
          for (std::size_t d = 0; d < dim; ++d) {
            x[d] = static_cast<double>(before[at + d]);
            squares += x[d] * x[d] / static_cast<double>(dim);
          }
          for (std::size_t d = 0; c.norm && d < dim; ++d) {
            x[d] *= static_cast<double>(norm[d]) /
                    std::sqrt(squares + static_cast<double>(kRotateEpsilon));
          }
          std::vector<double> y = x;
          for (std::size_t i = 0; i < pairs; ++i) {
            // The angle is one float32 product by definition.
            const auto angle =
                static_cast<double>(static_cast<float>(kRotatePositions[r]) * frequencies[i]);
            const double cosine = 1.25 * std::cos(angle), sine = 1.25 * std::sin(angle);
            y[i] = x[i] * cosine - x[i + pairs] * sine;
            y[i + pairs] = x[i + pairs] * cosine + x[i] * sine;
          }
          for (std::size_t d = 0; d < dim; ++d) {
            const double size =
                1.25 *
                (std::fabs(x[d]) + (d < 2 * pairs ? std::fabs(x[(d + pairs) % (2 * pairs)]) : 0));
            ASSERT_NEAR(static_cast<double>(after[at + d]), y[d],
                        size * 16 * 0x1p-24 + std::fabs(y[d]) * rounding(dtype) + 0x1p-25)
                << "position " << kRotatePositions[r] << " of " << c.head_dim << " at " << d;
          }
        }
      }
    }
  }
}

TEST(Rotate, GivesTheSameBitsOnEveryInstructionSetAndNumberOfRows) {
  cpu::Workers one(1);
  cpu::Workers workers(3);
  for (const DType dtype : kAllTypes) {
    for (const RotateCase& c : {RotateCase{128, 128, true}, RotateCase{20, 20, false}}) {
      const std::size_t stride = 2 * kRotatedHeads * static_cast<std::size_t>(c.head_dim);
      const Stored rows(dtype, normal_values(5, kRotatePositions.size() * stride));
      const Stored norm(dtype, normal_values(6, static_cast<std::size_t>(c.head_dim)));
      const Stored expected = rotated(c, rows, norm, dtype, 8, one);
      for (const cpu::Isa isa : cpu::available_isas()) {
        under(isa, [&] {
          EXPECT_EQ(rotated(c, rows, norm, dtype, 8, workers), expected) << cpu::name_of(isa);
          EXPECT_EQ(rotated(c, rows, norm, dtype, 3, workers), expected) << cpu::name_of(isa);
        });
      }
    }
  }
}

double exact_silu(double x) { return x / (1 + std::exp(-x)); }

TEST(GatedActivation, MultipliesTheActivatedGateByTheOtherHalf) {
  cpu::Workers workers(2);
  for (const DType dtype : kAllTypes) {
    for (const std::int32_t dim : {1, 15, 16, 33, 500}) {
      constexpr std::size_t kRows = 4;
      const auto width = static_cast<std::size_t>(dim);
      const Stored in(dtype, normal_values(7, kRows * 2 * width, 4));
      Stored out(dtype, std::vector<float>(kRows * (width + 1), -7));
      cpu::gated_activation({.out = {out.data(), dtype, dim + 1},
                             .in = {const_cast<void*>(in.data()), dtype, 2 * dim},
                             .rows = kRows,
                             .dim = dim,
                             .activation = Epilogue::silu},
                            workers);
      Stored inside = in;  // into the first half of its own rows
      cpu::gated_activation({.out = {inside.data(), dtype, 2 * dim},
                             .in = {inside.data(), dtype, 2 * dim},
                             .rows = kRows,
                             .dim = dim,
                             .activation = Epilogue::silu},
                            workers);
      for (std::size_t r = 0; r < kRows; ++r) {
        for (std::size_t c = 0; c < width; ++c) {
          const auto gate = static_cast<double>(in[r * 2 * width + c]);
          const double expected =
              exact_silu(gate) * static_cast<double>(in[r * 2 * width + width + c]);
          ASSERT_NEAR(static_cast<double>(out[r * (width + 1) + c]), expected,
                      std::fabs(expected) * (8 * 0x1p-24 + rounding(dtype)) + 1e-7);
          ASSERT_EQ(inside[r * 2 * width + c], out[r * (width + 1) + c]);
          ASSERT_EQ(inside[r * 2 * width + width + c], in[r * 2 * width + width + c]);
        }
        ASSERT_EQ(out[r * (width + 1) + width], -7.0f);
      }
    }
  }
}

TEST(GatedActivation, AndRmsNormGiveTheSameBitsOnEveryInstructionSet) {
  constexpr std::int32_t kDim = 333;
  const std::vector<float> in = normal_values(8, 20 * 2 * kDim, 5);
  const Stored weight(DType::bfloat16, normal_values(9, 2 * kDim));
  const auto run = [&](cpu::Workers& workers) {
    Stored out(DType::bfloat16, std::vector<float>(20 * 3 * kDim));
    for (const Epilogue activation : {Epilogue::silu, Epilogue::gelu, Epilogue::gelu_tanh}) {
      cpu::gated_activation({.out = {out.data(), DType::bfloat16, 3 * kDim},
                             .in = {const_cast<float*>(in.data()), DType::float32, 2 * kDim},
                             .rows = activation == Epilogue::silu ? 20 : 3,
                             .dim = kDim,
                             .activation = activation},
                            workers);
    }
    cpu::rms_norm(
        {.out = {static_cast<std::byte*>(out.data()) + 2 * kDim, DType::bfloat16, 3 * kDim},
         .in = in.data(),
         .weight = weight.data(),
         .dtype = DType::bfloat16,
         .rows = 20,
         .dim = 2 * kDim,
         .epsilon = 1e-6f},
        workers);
    return out;
  };
  cpu::Workers one(1);
  const Stored expected = run(one);
  cpu::Workers workers(3);
  for (const cpu::Isa isa : cpu::available_isas()) {
    under(isa, [&] { EXPECT_EQ(run(workers), expected) << cpu::name_of(isa); });
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
