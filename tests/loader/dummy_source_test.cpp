#include "loader/sources/dummy_source.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "tests/support/model_files.h"

namespace poise {
namespace {

std::vector<float> bell_shaped(std::uint64_t seed, std::uint64_t stream, std::int64_t first,
                               std::size_t count, float deviation = 1) {
  std::vector<float> values(count);
  fill_bell_shaped(seed, stream, first, deviation, values);
  return values;
}

struct Moments {
  double mean = 0, deviation = 0, kurtosis = 0;
};

Moments moments(const std::vector<float>& values) {
  Moments m;
  for (const float x : values) {
    m.mean += x / static_cast<double>(values.size());
  }
  double second = 0, fourth = 0;
  for (const float x : values) {
    const double d = x - m.mean;
    second += d * d / static_cast<double>(values.size());
    fourth += d * d * d * d / static_cast<double>(values.size());
  }
  m.deviation = std::sqrt(second);
  m.kurtosis = fourth / (second * second);
  return m;
}

TEST(DummyWeights, AreBellShapedWithTheAskedDeviation) {
  for (const std::uint64_t seed : {0, 1, 12345}) {
    const Moments m = moments(bell_shaped(seed, 3, 0, 1'000'000, 0.02F));
    EXPECT_NEAR(m.mean, 0, 0.0001);
    EXPECT_NEAR(m.deviation, 0.02, 0.0001);
    EXPECT_NEAR(m.kurtosis, 3 - 1.2 / 4, 0.05);  // of a sum of four uniform numbers
  }
}

// What random numbers must not show in a product of matrices: one row, column or tensor following
// from another.
TEST(DummyWeights, NeighboursRowsStreamsAndSeedsDoNotResembleOneAnother) {
  constexpr std::size_t kCount = 200'000;
  const std::vector<float> base = bell_shaped(5, 7, 0, kCount);
  const auto correlation = [&](const std::vector<float>& other) {
    double sum = 0;
    for (std::size_t i = 0; i < kCount; ++i) {
      sum += base[i] * other[i] / static_cast<double>(kCount);
    }
    return sum;
  };
  const double noise = 5 / std::sqrt(static_cast<double>(kCount));
  for (const std::int64_t distance : {1, 2, 3, 8, 64, 768, 1024, 4096, 1 << 16, 1 << 20}) {
    EXPECT_LT(std::abs(correlation(bell_shaped(5, 7, distance, kCount))), noise) << distance;
  }
  EXPECT_LT(std::abs(correlation(bell_shaped(5, 8, 0, kCount))), noise);
  EXPECT_LT(std::abs(correlation(bell_shaped(6, 7, 0, kCount))), noise);
  EXPECT_LT(std::abs(correlation(bell_shaped(5, 7, std::int64_t{1} << 32, kCount))), noise);
}

TEST(DummyWeights, AnElementIsTheSameHoweverItIsReached) {
  const std::int64_t start = (std::int64_t{1} << 32) - 500;  // where the keys change
  const std::vector<float> whole = bell_shaped(9, 2, start, 1000);
  std::mt19937 random(10);
  for (int i = 0; i < 200; ++i) {
    const std::size_t first = random() % 1000;
    const std::size_t count = 1 + random() % (1000 - first);
    const std::vector<float> part =
        bell_shaped(9, 2, start + static_cast<std::int64_t>(first), count);
    ASSERT_EQ(part, std::vector<float>(whole.begin() + static_cast<std::ptrdiff_t>(first),
                                       whole.begin() + static_cast<std::ptrdiff_t>(first + count)));
  }
}

TEST(DummyWeights, AreTheSameNumbersOnEveryMachine) {
  const std::vector<float> values = bell_shaped(1, 2, 3, 4, 147.8005F);
  EXPECT_EQ(values, (std::vector<float>{-96, 27, -57, 65}));
}

TEST(DummyWeights, EachKindHasItsScale) {
  ModelShape shape = testing_support::tiny_shape();
  shape.hidden_size = 256;
  shape.word_embed_proj_dim = 256;
  shape.head_dim = 64;
  shape.ffn_dim = 512;
  const WeightLayout layout = weight_layout(shape, DType::float32);
  const DummySource source(*families().front(), layout, DType::float32, 4);
  for (std::size_t i = 0; i < source.tensors().size(); ++i) {
    const WeightTensor& tensor = source.tensors()[i];
    std::vector<float> values(static_cast<std::size_t>(tensor.elements));
    source.fill(i, 0, std::as_writable_bytes(std::span(values)));
    const Moments m = moments(values);
    SCOPED_TRACE(tensor.name);
    const bool norm_weight = tensor.weight == Weight::attention_norm_weight ||
                             tensor.weight == Weight::mlp_norm_weight ||
                             tensor.weight == Weight::final_norm_weight;
    if (norm_weight) {
      EXPECT_EQ(m.mean, 1);
      EXPECT_EQ(m.deviation, 0);
    } else if (tensor.shape.size() == 1) {
      EXPECT_NEAR(m.deviation, 0.01, 0.002);
    } else {
      const bool residual = tensor.weight == Weight::w_o || tensor.weight == Weight::fc2;
      EXPECT_NEAR(m.deviation, residual ? 0.01 : 0.02, 0.0005);  // 0.02 / sqrt(2 · 2 layers)
    }
  }
}

TEST(DummyWeights, InAnotherTypeAreTheSameNumbersRounded) {
  const WeightLayout layout = weight_layout(testing_support::tiny_shape(), DType::float32);
  const DummySource exact(*families().front(), layout, DType::float32, 4);
  const DummySource rounded(*families().front(), layout, DType::bfloat16, 4);
  std::vector<float> wide(100);
  std::vector<BFloat16> narrow(100);
  exact.fill(0, 7, std::as_writable_bytes(std::span(wide)));
  rounded.fill(0, 7, std::as_writable_bytes(std::span(narrow)));
  for (std::size_t i = 0; i < wide.size(); ++i) {
    EXPECT_EQ(narrow[i].bits, to_bfloat16(wide[i]).bits);
  }
}

}  // namespace
}  // namespace poise
