// The activations and the exponential, through the operations that use them, against float64.
#include <gtest/gtest.h>

#include "kernels/cpu/lane_kernels.h"
#include "tests/kernels/tensors.h"

namespace poise::test {
namespace {

// How far `x` is from `exact`, in units in the last place of float32.
double ulps(float x, double exact) {
  const int exponent = std::max(std::ilogb(exact), -126);
  return std::fabs(static_cast<double>(x) - exact) / std::ldexp(1.0, exponent - 23);
}

std::vector<float> exp_of(const std::vector<float>& x) {
  std::vector<float> result(x.size());
  cpu::active_kernels().weigh_each(result.data(), x.data(), static_cast<std::int32_t>(x.size()), 0,
                                   1);
  return result;
}

TEST(Exp, IsWithinOneUlp) {
  double worst = 0;
  for (int block = 0; block < 2000; ++block) {
    std::vector<float> x(1000);
    for (std::size_t i = 0; i < x.size(); ++i) {
      // From -87.3 to 88.3 in two million steps that are no round numbers.
      x[i] = static_cast<float>(-87.3 +
                                175.6 * (block * 1000.0 + static_cast<double>(i) + 0.37) / 2e6);
    }
    const std::vector<float> result = exp_of(x);
    for (std::size_t i = 0; i < x.size(); ++i) {
      worst = std::max(worst, ulps(result[i], std::exp(static_cast<double>(x[i]))));
    }
  }
  EXPECT_LT(worst, 1.0);
  RecordProperty("worst_ulp_thousandths", static_cast<int>(worst * 1000));
}

TEST(Exp, HasItsEndsAndItsOne) {
  const std::vector<float> result =
      exp_of({0.0f, -0.0f, -88.0f, -1e30f, -INFINITY, 89.0f, INFINITY, std::nanf("")});
  EXPECT_EQ(result[0], 1.0f);
  EXPECT_EQ(result[1], 1.0f);
  EXPECT_EQ(result[2], 0.0f);
  EXPECT_EQ(result[3], 0.0f);
  EXPECT_EQ(result[4], 0.0f);
  EXPECT_EQ(result[5], INFINITY);
  EXPECT_EQ(result[6], INFINITY);
  EXPECT_TRUE(std::isnan(result[7]));
}

// An activation alone: a Gemm of one input with weight 1.
std::vector<float> activate(Epilogue epilogue, std::vector<float> x) {
  cpu::Workers workers(1);
  const PackedWeight one(Stored(DType::float32, std::vector<float>{1}), 1, 1);
  std::vector<float> out(x.size());
  cpu::gemm({.out = {out.data(), DType::float32, 1},
             .in = {x.data(), DType::float32, 1},
             .weight = one.matrix(),
             .rows = static_cast<std::int64_t>(x.size()),
             .epilogue = epilogue},
            workers);
  return out;
}

std::vector<float> from_minus_to_plus(double end, std::size_t count) {
  std::vector<float> x(count);
  for (std::size_t i = 0; i < count; ++i) {
    x[i] = static_cast<float>(-end + 2 * end * (static_cast<double>(i) + 0.37) /
                                         static_cast<double>(count));
  }
  return x;
}

TEST(Gelu, IsExactToAFewUlpsDownToItsTail) {
  const std::vector<float> x = from_minus_to_plus(12, 400000);
  const std::vector<float> y = activate(Epilogue::gelu, x);
  for (std::size_t i = 0; i < x.size(); ++i) {
    const auto at = static_cast<double>(x[i]);
    const double exact = 0.5 * at * std::erfc(-at * std::sqrt(0.5));
    // For x < 0 the factor 1 - erf(|x|/√2) loses what |x| near 0.7 makes it lose; z² grows by its
    // own rounding in the tail.
    ASSERT_LE(std::fabs(static_cast<double>(y[i]) - exact),
              4e-7 * std::fabs(exact) + 6e-8 * std::min(1.0, std::fabs(at)) + 1e-36)
        << x[i];
  }
}

TEST(Gelu, TanhFormIsExactToAFewUlps) {
  const std::vector<float> x = from_minus_to_plus(9, 400000);
  const std::vector<float> y = activate(Epilogue::gelu_tanh, x);
  for (std::size_t i = 0; i < x.size(); ++i) {
    const auto at = static_cast<double>(x[i]);
    const double inner = std::sqrt(2 / M_PI) * (at + 0.044715 * at * at * at);
    const double exact = at / (1 + std::exp(-2 * inner));
    // The exponent is rounded four times and grows.
    ASSERT_LE(std::fabs(static_cast<double>(y[i]) - exact),
              (3e-7 + 2.4e-7 * std::fabs(2 * inner)) * std::fabs(exact) + 1e-36)
        << x[i];
  }
}

TEST(Gelu, KeepsInfinityAndWhatIsNoNumber) {
  const std::vector<float> ends = {INFINITY, 1e30f, -1e30f, std::nanf(""), 0.0f};
  for (const Epilogue epilogue : {Epilogue::gelu, Epilogue::gelu_tanh}) {
    const std::vector<float> y = activate(epilogue, ends);
    EXPECT_EQ(y[0], INFINITY);
    EXPECT_EQ(y[1], 1e30f);
    EXPECT_EQ(y[2], 0.0f);
    EXPECT_TRUE(std::isnan(y[3]));
    EXPECT_EQ(y[4], 0.0f);
  }
  const std::vector<float> relu = activate(Epilogue::relu, {-1.0f, 2.0f, std::nanf("")});
  EXPECT_EQ(relu[0], 0.0f);
  EXPECT_EQ(relu[1], 2.0f);
  EXPECT_TRUE(std::isnan(relu[2]));
}

}  // namespace
}  // namespace poise::test
