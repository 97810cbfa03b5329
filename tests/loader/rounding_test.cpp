// Weights that become codes as they are loaded: the rule in common/formats/packed_weights.h, number by number.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "common/device_memory.h"
#include "loader/model_on_disk.h"
#include "loader/sources/packing_source.h"
#include "tests/loader/filled_model.h"
#include "tests/support/complaint.h"
#include "tests/support/model_files.h"
#include "tests/support/packed_numbers.h"

namespace poise {
namespace {

using namespace testing_support;
using ::testing::Contains;
using ::testing::HasSubstr;

// What a weight becomes: the rule's words in double, where no rounding but the named ones happens.
std::vector<float> rounded_numbers(const std::vector<float>& weights, std::size_t cols, float most,
                                   DType dtype) {
  std::vector<float> result;
  for (std::size_t row = 0; row < weights.size(); row += cols) {
    for (std::size_t first = 0; first < cols; first += 128) {
      const std::size_t count = std::min<std::size_t>(128, cols - first);
      float largest = 0;
      for (std::size_t i = 0; i < count; ++i) {
        largest = std::max(largest, std::fabs(weights[row + first + i]));
      }
      const float scale = test::number_rounded(largest / most, dtype);
      for (std::size_t i = 0; i < count; ++i) {
        const float quotient = weights[row + first + i] / scale;
        double code = std::round(static_cast<double>(quotient));
        if (std::fabs(static_cast<double>(quotient) - std::trunc(quotient)) == 0.5) {
          code = 2 * std::round(static_cast<double>(quotient) / 2);  // half to even
        }
        code = std::clamp(code, -static_cast<double>(most), static_cast<double>(most));
        result.push_back(
            test::number_rounded(scale == 0 ? 0 : scale * static_cast<float>(code), dtype));
      }
    }
  }
  return result;
}

TEST(Rounding, ALayersMatricesAreTheRulesNumbersAndAllElseIsPlain) {
  const TempDirectory directory;
  ModelShape shape = tiny_shape();
  shape.ffn_dim = 304;  // two groups and a rest of 48
  write_model(directory.path(), {.shape = shape, .stored = DType::float32});
  for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16}) {
    const ModelOnDisk plain = open_model(directory.path(), {.dtype = dtype});
    const std::vector<std::byte> numbers = filled(plain);
    for (const Quantization asked : {Quantization::int8, Quantization::int4}) {
      const ModelOnDisk packed =
          open_model(directory.path(), {.dtype = dtype, .quantization = asked});
      const std::vector<std::byte> codes = filled(packed);
      const float most = asked == Quantization::int4 ? 7 : 127;
      EXPECT_EQ(std::memcmp(codes.data(), numbers.data(),
                            static_cast<std::size_t>(plain.layout.outer.bytes.n)),
                0);
      for (const LayerId layer : {LayerId{0}, LayerId{1}}) {
        for (const WeightEntry& entry : packed.layout.layer.entries) {
          const WeightEntry& from = *plain.layout.layer.find(entry.weight);
          const std::byte* at = numbers.data() + plain.layout.layer_offset(layer) + from.offset;
          const std::byte* to = codes.data() + packed.layout.layer_offset(layer) + entry.offset;
          EXPECT_EQ(entry.packed, entry.matrix()) << name_of(entry.weight);
          if (!entry.packed) {
            EXPECT_EQ(std::memcmp(to, at, static_cast<std::size_t>(entry.bytes.n)), 0);
            continue;
          }
          std::vector<float> weights;
          for (std::int64_t i = 0; i < std::int64_t{entry.rows} * entry.cols; ++i) {
            weights.push_back(test::stored_number(at + i * size_of(dtype).n, dtype));
          }
          EXPECT_EQ(
              test::unpacked_numbers(packed.config.shape.packed, dtype, entry.rows, entry.cols, to),
              rounded_numbers(weights, static_cast<std::size_t>(entry.cols), most, dtype))
              << name_of(entry.weight);
        }
      }
    }
  }
}

TEST(Rounding, GroupsOfZerosStayZeroAndWhatIsNotFiniteStaysSo) {
  const PackedFormat format{.codes = Codes::int4, .scale_dtype = DType::float16, .group = 128};
  std::vector<float> rows(std::size_t{16} * 256, 0.0F);
  rows[3 * 256 + 5] = std::numeric_limits<float>::quiet_NaN();
  rows[4 * 256 + 200] = std::numeric_limits<float>::infinity();
  rows[5 * 256 + 1] = -1e-9F;  // its scale is 0 in float16
  std::vector<std::byte> panel(static_cast<std::size_t>(packed_panel(format, 256).bytes.n));
  round_panel(format, rows, panel);
  const auto numbers = test::unpacked_numbers(format, DType::float16, 16, 256, panel.data());
  for (std::size_t row = 0; row < 16; ++row) {
    for (std::size_t k = 0; k < 256; ++k) {
      const bool broken = (row == 3 && k < 128) || (row == 4 && k >= 128);
      const float value = numbers[row * 256 + k];
      EXPECT_TRUE(broken ? std::isnan(value) : value == 0) << row << " " << k;
    }
  }
}

TEST(Rounding, BytesFallByTheCodesAndTheScales) {
  ModelShape shape = tiny_shape();
  shape.hidden_size = shape.word_embed_proj_dim = 512;
  shape.num_attention_heads = shape.num_key_value_heads = 8;
  shape.head_dim = 64;
  shape.ffn_dim = 2048;
  const Bytes plain = weight_layout(shape, DType::float16).layer.bytes;
  const auto share = [&](Quantization asked) {
    const ModelShape packed = quantized(shape, asked, PackWeights::off, DType::float16);
    const Bytes layer = weight_layout(packed, DType::float16).layer.bytes;
    const DeviceSizes sizes = device_sizes(packed, DType::float16, {});
    EXPECT_LE(sizes.layer_slab, layer);
    EXPECT_EQ(sizes.unpacked.n, 2LL * 12 * 512 * 512);
    return static_cast<double>(layer.n) / static_cast<double>(plain.n);
  };
  EXPECT_NEAR(share(Quantization::int8), (8 + 16 / 128.0) / 16, 0.01);
  EXPECT_NEAR(share(Quantization::int4), (4 + 16 / 128.0) / 16, 0.01);
  EXPECT_EQ(device_sizes(shape, DType::float16, {}).unpacked.n, 0);
}

TEST(Rounding, AMatrixWhoseRowsFillNoWholePanelsStaysPlainAndIsNamed) {
  const TempDirectory directory;
  ModelShape shape = tiny_shape();
  shape.ffn_dim = 40;
  write_model(directory.path(), {.shape = shape});
  const ModelOnDisk model = open_model(directory.path(), {.quantization = Quantization::int8});
  EXPECT_FALSE(model.layout.layer.find(Weight::fc1)->packed);
  EXPECT_TRUE(model.layout.layer.find(Weight::fc2)->packed);
  EXPECT_THAT(model.notices, Contains(HasSubstr("multiple of 16 outputs: fc1")));
  filled(model);
}

// Dummies of a config that says how its checkpoint is quantised.
TEST(DummyCodes, ArePackedAsTheConfigSaysAndSpreadLikeOtherDummies) {
  constexpr const char* kLlama =
      R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float16",
      "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
      "num_key_value_heads": 2, "vocab_size": 61, "max_position_embeddings": 64,
      "quantization_config": )";
  constexpr const char* kFormats[] = {
      R"({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": false, "desc_act": true})",
      R"({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": false})",
      R"({"quant_method": "gptq", "bits": 8, "group_size": -1})",
      R"({"quant_method": "fp8", "weight_block_size": [32, 32]})"};
  for (const char* format : kFormats) {
    const TempDirectory directory;
    write_file(directory.path() / "config.json", std::string(kLlama) + format + "}");
    const ModelOnDisk model = open_model(directory.path(), {.format = LoadFormat::dummy});
    const PackedFormat& packed = model.config.shape.packed;
    ASSERT_TRUE(packed.is_packed()) << format;
    const std::vector<std::byte> segment = filled(model);
    EXPECT_EQ(filled(model), segment) << format;
    for (const WeightEntry& entry : model.layout.layer.entries) {
      if (!entry.packed) {
        continue;
      }
      const std::byte* at =
          segment.data() + model.layout.layer_offset(LayerId{1}) + entry.offset;
      std::vector<std::uint16_t> groups;
      if (packed.input_groups != 0) {
        const WeightEntry& table = *model.layout.layer.find(groups_of(entry.weight));
        groups.resize(static_cast<std::size_t>(table.bytes.n / 2));
        std::memcpy(groups.data(),
                    segment.data() + model.layout.layer_offset(LayerId{1}) + table.offset,
                    groups.size() * 2);
        EXPECT_EQ(groups[40], 1) << format;
      }
      const std::vector<float> numbers = test::unpacked_numbers(packed, model.dtype, entry.rows,
                                                                entry.cols, at, groups);
      double sum = 0, squares = 0;
      for (const float number : numbers) {
        sum += number;
        squares += static_cast<double>(number) * number;
      }
      const auto count = static_cast<double>(numbers.size());
      const bool residual = entry.weight == Weight::w_o || entry.weight == Weight::fc2;
      const double wanted = residual ? 0.01 : 0.02;  // 0.02 / sqrt(2 · 2 layers)
      EXPECT_NEAR(std::sqrt(squares / count), wanted, 0.06 * wanted) << format;
      EXPECT_NEAR(sum / count, 0, 0.05 * wanted) << format;
    }
    EXPECT_THAT(testing_support::complaint([&] {
                  open_model(directory.path(), {.format = LoadFormat::dummy,
                                                .quantization = Quantization::int8});
                }),
                HasSubstr("quantised already"));
  }
}

}  // namespace
}  // namespace poise
