#include <gtest/gtest.h>

#include <utility>

#include "tests/kernels/tensors.h"

namespace poise::test {
namespace {

struct Case {
  std::int64_t rows;
  std::int32_t outputs, inputs;
  DType dtype = DType::float32;
  DType in_type = DType::float32;
  DType out_type = DType::float32;
  Epilogue epilogue = Epilogue::none;
  bool bias = true, residual = false;
};

// One Gemm with its operands; rows lie with gaps between them.
struct Operands {
  explicit Operands(const Case& c, std::uint32_t seed = 1)
      : test(c),
        in_stride(c.inputs + 3),
        out_stride(c.outputs + 5),
        in(c.in_type, normal_values(seed, static_cast<std::size_t>(c.rows * in_stride))),
        weight(c.dtype, normal_values(seed + 1, static_cast<std::size_t>(c.outputs) *
                                                    static_cast<std::size_t>(c.inputs))),
        bias(c.dtype, normal_values(seed + 2, static_cast<std::size_t>(c.outputs), 3)),
        residual(normal_values(seed + 3, static_cast<std::size_t>(c.rows * out_stride), 3)),
        packed(weight, c.outputs, c.inputs) {}

  Gemm op(Stored& out, std::int64_t first, std::int64_t rows) const {
    const auto row = [&](const void* data, DType dtype, std::int64_t stride) {
      return static_cast<std::byte*>(const_cast<void*>(data)) + first * stride * size_of(dtype).n;
    };
    return {.out = {row(out.data(), test.out_type, out_stride), test.out_type, out_stride},
            .in = {row(in.data(), test.in_type, in_stride), test.in_type, in_stride},
            .weight = packed.matrix(),
            .bias = test.bias ? bias.data() : nullptr,
            .residual = test.residual ? residual.data() + first * out_stride : nullptr,
            .rows = rows,
            .epilogue = test.epilogue};
  }
  Stored blank() const {
    return Stored(test.out_type,
                  std::vector<float>(static_cast<std::size_t>(test.rows * out_stride), -7.0f));
  }
  Stored run(cpu::Workers& workers) const {
    Stored out = blank();
    cpu::gemm(op(out, 0, test.rows), workers);
    return out;
  }

  Case test;
  std::int64_t in_stride, out_stride;
  Stored in, weight, bias;
  std::vector<float> residual;
  PackedWeight packed;
};

double activation(Epilogue epilogue, double x) {
  switch (epilogue) {
    case Epilogue::relu:
      return x > 0 ? x : 0;
    case Epilogue::gelu:
      return 0.5 * x * std::erfc(-x * std::sqrt(0.5));
    case Epilogue::gelu_tanh:
      return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    default:
      return x;
  }
}

// Against float64, with the error a chain of `inputs` rounded additions may have.
void expect_right(const Operands& o, const Stored& out) {
  const Case& c = o.test;
  for (std::int64_t r = 0; r < c.rows; ++r) {
    for (std::int32_t n = 0; n < c.outputs; ++n) {
      double sum = 0;
      double magnitude = 0;
      for (std::int32_t k = 0; k < c.inputs; ++k) {
        const double product =
            static_cast<double>(o.in[static_cast<std::size_t>(r * o.in_stride + k)]) *
            static_cast<double>(
                o.weight[static_cast<std::size_t>(n) * static_cast<std::size_t>(c.inputs) +
                         static_cast<std::size_t>(k)]);
        sum += product;
        magnitude += std::fabs(product);
      }
      if (c.bias) {
        sum += static_cast<double>(o.bias[static_cast<std::size_t>(n)]);
      }
      const auto at = static_cast<std::size_t>(r * o.out_stride + n);
      double expected = activation(c.epilogue, sum);
      const double residual = c.residual ? static_cast<double>(o.residual[at]) : 0.0;
      expected += residual;
      // Activations have a slope of at most 1.13; their own error is 4e-7 of the value.
      const double tolerance =
          1.13 * (c.inputs + 2) * 0x1p-24 * (magnitude + 3) +
          (std::fabs(expected) + std::fabs(residual)) * (rounding(c.out_type) + 4e-7);
      ASSERT_NEAR(static_cast<double>(out[at]), expected, tolerance)
          << "row " << r << " output " << n;
    }
    for (std::int64_t n = c.outputs; n < o.out_stride; ++n) {
      ASSERT_EQ(out[static_cast<std::size_t>(r * o.out_stride + n)], -7.0f)
          << "wrote past row " << r;
    }
  }
}

TEST(Gemm, IsTheProductForShapesAroundItsTiles) {
  cpu::Workers workers(2);
  for (const std::int64_t rows : {1, 2, 3, 5, 8, 12, 13, 33}) {
    for (const std::int32_t outputs : {1, 15, 16, 17, 33, 130}) {
      for (const std::int32_t inputs : {1, 16, 17, 100}) {
        SCOPED_TRACE(testing::Message() << rows << " x " << outputs << " x " << inputs);
        const Operands o({.rows = rows, .outputs = outputs, .inputs = inputs});
        expect_right(o, o.run(workers));
      }
    }
  }
}

TEST(Gemm, IsTheProductForEveryTypeOfWeightInputAndOutput) {
  cpu::Workers workers(2);
  for (const DType dtype : kAllTypes) {
    for (const DType in_type : kAllTypes) {
      for (const DType out_type : kAllTypes) {
        SCOPED_TRACE(testing::Message()
                     << name_of(dtype) << " " << name_of(in_type) << " " << name_of(out_type));
        const Operands o({.rows = 13,
                          .outputs = 37,
                          .inputs = 65,
                          .dtype = dtype,
                          .in_type = in_type,
                          .out_type = out_type,
                          .residual = true});
        expect_right(o, o.run(workers));
      }
    }
  }
}

TEST(Gemm, AppliesEachEpilogueBeforeTheResidual) {
  cpu::Workers workers(2);
  for (const Epilogue epilogue :
       {Epilogue::none, Epilogue::relu, Epilogue::gelu, Epilogue::gelu_tanh}) {
    for (const bool residual : {false, true}) {
      for (const bool bias : {false, true}) {
        const Operands o({.rows = 5,
                          .outputs = 40,
                          .inputs = 9,
                          .epilogue = epilogue,
                          .bias = bias,
                          .residual = residual});
        expect_right(o, o.run(workers));
      }
    }
  }
}

TEST(Gemm, TakesInputsInSeveralPassesWhereTheyAreMany) {
  cpu::Workers workers(2);
  const Operands o({.rows = 14, .outputs = 35, .inputs = 7001, .residual = true});
  expect_right(o, o.run(workers));
}

TEST(Gemm, AddsToTheResidualInPlace) {
  cpu::Workers workers(2);
  const Operands o({.rows = 14, .outputs = 50, .inputs = 64, .residual = true});
  const Stored apart = o.run(workers);
  Stored inout(DType::float32, o.residual);
  Gemm op = o.op(inout, 0, 14);
  op.residual = static_cast<const float*>(inout.data());
  cpu::gemm(op, workers);
  for (std::int64_t r = 0; r < 14; ++r) {
    for (std::int64_t n = 0; n < 50; ++n) {
      const auto at = static_cast<std::size_t>(r * o.out_stride + n);
      EXPECT_EQ(inout[at], apart[at]);
    }
  }
}

// The definition itself: one chain, in order.
TEST(Gemm, IsOneChainOfFusedMultiplyAddsPerOutput) {
  cpu::Workers workers(2);
  const Operands o({.rows = 13, .outputs = 33, .inputs = 500, .dtype = DType::float16});
  const Stored out = o.run(workers);
  for (std::int64_t r = 0; r < 13; ++r) {
    for (std::size_t n = 0; n < 33; ++n) {
      float sum = 0;
      for (std::size_t k = 0; k < 500; ++k) {
        sum = std::fma(o.in[static_cast<std::size_t>(r * o.in_stride) + k], o.weight[n * 500 + k],
                       sum);
      }
      ASSERT_EQ(out[static_cast<std::size_t>(r * o.out_stride) + n], sum + o.bias[n]);
    }
  }
}

class GemmBits : public testing::TestWithParam<DType> {};

TEST_P(GemmBits, AreTheSameOnEveryInstructionSetAndNumberOfWorkers) {
  for (const Epilogue epilogue : {Epilogue::none, Epilogue::gelu, Epilogue::gelu_tanh}) {
    const Operands o({.rows = 29,
                      .outputs = 200,
                      .inputs = 129,
                      .dtype = GetParam(),
                      .in_type = GetParam(),
                      .out_type = GetParam(),
                      .epilogue = epilogue,
                      .residual = true});
    cpu::Workers one(1);
    const Stored expected = o.run(one);
    for (const int threads : {1, 2, 3, 5}) {
      cpu::Workers workers(threads);
      for (const cpu::Isa isa : cpu::available_isas()) {
        under(isa, [&] {
          EXPECT_EQ(o.run(workers), expected)
              << cpu::name_of(isa) << " with " << threads << " workers";
        });
      }
    }
  }
}

TEST_P(GemmBits, OfARowDoNotDependOnTheRowsBesideIt) {
  constexpr std::int64_t kRows = 40;
  const Operands o({.rows = kRows, .outputs = 150, .inputs = 70, .dtype = GetParam()});
  cpu::Workers workers(2);
  const Stored whole = o.run(workers);
  for (std::int64_t rows = 1; rows <= 27; ++rows) {
    Stored parts = o.blank();
    for (std::int64_t first = 0; first < kRows; first += rows) {
      cpu::gemm(o.op(parts, first, std::min(rows, kRows - first)), workers);
    }
    EXPECT_EQ(parts, whole) << rows << " rows at a time";
  }
}

INSTANTIATE_TEST_SUITE_P(Types, GemmBits, testing::ValuesIn(kAllTypes),
                         [](const auto& info) { return std::string(name_of(info.param)); });

void expect_packed(std::int32_t rows, std::int32_t cols, DType dtype, std::size_t misaligned) {
  const auto size = static_cast<std::size_t>(size_of(dtype).n);
  const auto bytes = static_cast<std::size_t>(cpu::packed_bytes(rows, cols, dtype).n);
  ASSERT_EQ(bytes, static_cast<std::size_t>((rows + 15) / 16 * 16 * cols) * size);
  const Stored source(dtype, normal_values(7, static_cast<std::size_t>(rows * cols)));
  std::vector<std::byte> memory(bytes + 128, std::byte{0x55});
  std::size_t at = 64 - reinterpret_cast<std::uintptr_t>(memory.data()) % 64 + misaligned * size;
  cpu::pack_matrix(memory.data() + at, source.data(), rows, cols, dtype);
  EXPECT_EQ(memory[at - 1], std::byte{0x55});
  EXPECT_EQ(memory[at + bytes], std::byte{0x55});
  const auto* from = static_cast<const std::byte*>(source.data());
  const std::vector<std::byte> zero(size);
  for (std::int32_t panel = 0; panel < (rows + 15) / 16; ++panel) {
    for (std::int32_t c = 0; c < cols; ++c) {
      for (std::int32_t r = 16 * panel; r < 16 * panel + 16; ++r, at += size) {
        const std::byte* expected =
            r < rows ? from + static_cast<std::size_t>(r * cols + c) * size : zero.data();
        ASSERT_EQ(std::memcmp(memory.data() + at, expected, size), 0) << r << ", " << c;
      }
    }
  }
}

TEST(PackedMatrix, HoldsSixteenRowsSideBySideAndZerosAfterTheLast) {
  for (const cpu::Isa isa : cpu::available_isas()) {
    for (const DType dtype : kAllTypes) {
      for (const std::int32_t rows : {1, 15, 16, 17, 33}) {
        for (const std::int32_t cols : {1, 7, 16, 17, 31, 40, 70}) {
          for (const std::size_t misaligned : {0, 1}) {
            SCOPED_TRACE(testing::Message() << cpu::name_of(isa) << " " << name_of(dtype) << " "
                                            << rows << " x " << cols);
            under(isa, [&] { expect_packed(rows, cols, dtype, misaligned); });
          }
        }
      }
    }
  }
}

TEST(PackedMatrix, IsTheSameInParts) {
  const Stored source(DType::float16, normal_values(3, 70 * 19));
  const auto count = static_cast<std::size_t>(5 * 16 * 19);
  Stored whole(DType::float16, count);
  Stored parts(DType::float16, count);
  cpu::pack_matrix(whole.data(), source.data(), 70, 19, DType::float16);
  for (const auto& [first, end] : {std::pair{3, 5}, std::pair{0, 1}, std::pair{1, 3}}) {
    cpu::pack_panels(parts.data(), source.data(), 70, 19, DType::float16, first, end);
  }
  EXPECT_EQ(parts, whole);
}

}  // namespace
}  // namespace poise::test
