// bfloat16 weights that are packed without loss while they are loaded (common/formats/bfloat12.h).

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "common/trouble.h"
#include "loader/model_on_disk.h"
#include "loader/sources/bfloat12_panel.h"
#include "tests/loader/filled_model.h"
#include "tests/support/model_files.h"
#include "tests/support/packed_numbers.h"

namespace poise {
namespace {

using namespace testing_support;

constexpr LoadOptions kPacked{.dtype = DType::bfloat16, .pack_weights = PackWeights::automatic};

struct PackedPanelOf {
  explicit PackedPanelOf(const std::vector<std::uint16_t>& bits)
      : panel(static_cast<std::size_t>(
            bfloat12_panel(static_cast<std::int32_t>(bits.size() / 16)).bytes.n)),
        fits(pack_bfloat12(std::as_bytes(std::span(bits)), panel)),
        weights(
            test::bfloat12_bits(16, static_cast<std::int32_t>(bits.size() / 16), panel.data())) {
    const Bfloat12Panel map = bfloat12_panel(static_cast<std::int32_t>(bits.size() / 16));
    for (std::int32_t i = 0; i < map.room; ++i) {
      std::uint32_t escape;
      std::memcpy(&escape, panel.data() + map.escapes + i * 4, 4);
      escapes += escape != kNoEscape ? 1 : 0;
    }
  }
  std::vector<std::byte> panel;
  bool fits;
  std::vector<std::uint16_t> weights;
  int escapes = 0;
};

std::uint16_t bits_of(float weight) { return to_bfloat16(weight).bits; }

std::vector<std::uint16_t> gaussian_bits(std::size_t count) {
  std::mt19937 random(5);
  std::normal_distribution<float> normal(0, 0.02F);
  std::vector<std::uint16_t> bits(count);
  std::ranges::generate(bits, [&] { return bits_of(normal(random)); });
  return bits;
}

TEST(Bfloat12, WeightsComeOutAsTheyWentIn) {
  for (const std::size_t cols : {1, 2, 15, 127, 128, 129, 1000}) {
    std::vector<std::uint16_t> bits = gaussian_bits(16 * cols);
    bits[0] = 0x8000;             // -0
    bits[cols] = 0x0001;          // subnormal
    bits[2 * cols] = 0xff80;      // -infinity
    bits[4 * cols - 1] = 0x7f81;  // signalling
    const PackedPanelOf packed(bits);
    EXPECT_TRUE(packed.fits) << cols;
    EXPECT_EQ(packed.weights, bits) << cols;
  }
}

TEST(Bfloat12, AMillionGaussianWeightsTakeThreeQuartersAndHaveFewEscapes) {
  constexpr std::size_t kCols = 1 << 16;
  const PackedPanelOf packed(gaussian_bits(16 * kCols));
  EXPECT_TRUE(packed.fits);
  EXPECT_NEAR(static_cast<double>(packed.panel.size()) / (32 * kCols), 0.762, 0.001);
  EXPECT_NEAR(packed.escapes, 16.0 * kCols / 5000, 16.0 * kCols / 10000);
}

TEST(Bfloat12, TheBaseLeavesTheFewestEscapes) {
  std::vector<std::uint16_t> bits(std::size_t{16} * 128, bits_of(0.02F));
  bits[5] = 0x7f80;  // infinity, beside 127 that are alike
  bits[128 + 7] = bits_of(1e30F);
  bits[256 + 9] = bits_of(1e-30F);
  const PackedPanelOf packed(bits);
  EXPECT_EQ(packed.weights, bits);
  EXPECT_EQ(packed.escapes, 3);
}

TEST(Bfloat12, AsManyEscapesFitAsTheTableHasRoomForAndNotOneMore) {
  std::vector<std::uint16_t> bits(std::size_t{16} * 128, bits_of(1));
  const std::int32_t room = bfloat12_panel(128).room;
  for (std::int32_t i = 0; i < room; ++i) {
    bits[static_cast<std::size_t>(i) * 128 % bits.size() + static_cast<std::size_t>(i)] =
        bits_of(1e-9F);
  }
  const PackedPanelOf full(bits);
  EXPECT_TRUE(full.fits);
  EXPECT_EQ(full.escapes, room);
  EXPECT_EQ(full.weights, bits);
  bits.back() = bits_of(1e9F);
  EXPECT_FALSE(PackedPanelOf(bits).fits);
}

void expect_same_weights(const std::filesystem::path& directory, LoadFormat format) {
  LoadOptions options = kPacked;
  options.format = format;
  const ModelOnDisk packed = open_model(directory, options);
  options.pack_weights = PackWeights::off;
  const ModelOnDisk plain = open_model(directory, options);
  ASSERT_EQ(packed.config.shape.packed, kBfloat12);
  const std::vector<std::byte> panels = filled(packed), numbers = filled(plain);
  for (std::uint32_t layer = 0; layer < 2; ++layer) {
    for (const WeightEntry& entry : packed.layout.layer.entries) {
      const WeightEntry& from = *plain.layout.layer.find(entry.weight);
      const std::byte* at = numbers.data() + plain.layout.layer_offset({layer}) + from.offset;
      const std::byte* to = panels.data() + packed.layout.layer_offset({layer}) + entry.offset;
      EXPECT_EQ(entry.packed, entry.matrix()) << name_of(entry.weight);
      if (entry.packed) {
        const auto bits = test::bfloat12_bits(entry.rows, entry.cols, to);
        EXPECT_EQ(std::memcmp(bits.data(), at, bits.size() * 2), 0) << name_of(entry.weight);
      } else {
        EXPECT_EQ(std::memcmp(to, at, static_cast<std::size_t>(entry.bytes.n)), 0);
      }
    }
  }
}

TEST(Bfloat12, AModelsMatricesArePackedAndAllElseIsPlain) {
  const TempDirectory directory;
  write_model(directory.path(), {.shape = tiny_shape(), .stored = DType::float32});
  expect_same_weights(directory.path(), LoadFormat::from_files);
  expect_same_weights(directory.path(), LoadFormat::dummy);
}

TEST(Bfloat12, OtherTypesAndQuantisedWeightsAreNotPacked) {
  const TempDirectory directory;
  write_model(directory.path(), {.shape = tiny_shape(), .stored = DType::float32});
  LoadOptions options = kPacked;
  options.quantization = Quantization::int8;
  EXPECT_EQ(open_model(directory.path(), options).config.shape.packed.codes, Codes::int8);
  options.quantization = Quantization::none;
  EXPECT_EQ(open_model(directory.path(), options).config.shape.packed.codes, Codes::bfloat12);
  for (const DType dtype : {DType::float16, DType::float32}) {
    options.dtype = dtype;
    EXPECT_FALSE(open_model(directory.path(), options).config.shape.packed.is_packed());
  }
}

TEST(Bfloat12, AModelThatCannotBePackedIsNamed) {
  const TempDirectory directory;
  TinyModel tiny{.shape = tiny_shape(), .stored = DType::float32};
  std::vector<FileTensor> tensors;
  for (auto& [name, tensor] : tiny_weights(tiny)) {
    if (name.ends_with("layers.1.fc1.weight")) {
      for (std::size_t i = 0; i < tensor.values.size(); ++i) {
        tensor.values[i] = std::ldexp(1.0F, static_cast<int>(i % 100) - 50);
      }
    }
    tensors.push_back(file_tensor(name, DType::bfloat16, tensor.shape, tensor.values));
  }
  write_model(directory.path(), tiny);
  write_file(directory.path() / "model.safetensors", safetensors_bytes(tensors));
  try {
    filled(open_model(directory.path(), kPacked));
    ADD_FAILURE() << "it was packed";
  } catch (const Failure& failure) {
    EXPECT_EQ(failure.code(), Exit::unpackable);
    EXPECT_THAT(failure.what(), ::testing::HasSubstr("layers.1.fc1.weight cannot be packed"));
  }
}

}  // namespace
}  // namespace poise
