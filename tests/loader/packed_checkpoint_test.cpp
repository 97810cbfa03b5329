// Quantised checkpoints as the loader reads them from disk. What their numbers mean is compared with transformers
// (tests/e2e/goldens.py), damaged ones are in tests/e2e/hostile_models.py.

#include <gtest/gtest.h>

#include <fstream>
#include <string>
#include <vector>

#include "common/files/json.h"
#include "loader/model_on_disk.h"
#include "tests/support/model_files.h"

namespace poise {
namespace {

using namespace testing_support;

// Bytes that this process has read so far, from files of any kind.
std::int64_t bytes_read() {
  std::ifstream file("/proc/self/io");
  std::string name;
  std::int64_t bytes = 0;
  file >> name >> bytes;
  return bytes;
}

// The layers' matrices in int8, each with a scale for 32 inputs of each output; other tensors stay plain.
void write_packed(const std::filesystem::path& directory, const ModelShape& shape) {
  constexpr std::int64_t kGroup = 32;
  std::vector<FileTensor> tensors;
  for (const auto& [name, tensor] : tiny_weights({.shape = shape})) {
    if (tensor.shape.size() != 2 || name.find("layers.") == std::string::npos) {
      tensors.push_back(file_tensor(name, DType::float32, tensor.shape, tensor.values));
      continue;
    }
    const std::int64_t rows = tensor.shape[0], groups = tensor.shape[1] / kGroup;
    tensors.push_back(
        {name, "I8", tensor.shape, std::string(static_cast<std::size_t>(rows * tensor.shape[1]), 1)});
    tensors.push_back(file_tensor(name + "_scale", DType::float32, {rows, groups},
                                  std::vector<float>(static_cast<std::size_t>(rows * groups), 1)));
  }
  nlohmann::json config = nlohmann::json::parse(config_json(shape, "float32"));
  config["quantization_config"] = nlohmann::json::parse(R"({"quant_method": "compressed-tensors",
      "format": "int-quantized", "config_groups": {"group_0": {"targets": ["Linear"], "weights":
      {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 32}}}})");
  write_file(directory / "config.json", config.dump());
  write_file(directory / "model.safetensors", safetensors_bytes(tensors));
}

// A tensor is filled in many parts, here a panel of 16 outputs at a time.
TEST(PackedCheckpoint, IsReadOnceHoweverManyPartsItIsFilledIn) {
  const TempDirectory directory;
  ModelShape shape = tiny_shape();
  shape.ffn_dim = 1024;
  write_packed(directory.path(), shape);
  const ModelOnDisk model = open_model(directory.path(), {.dtype = DType::float32});
  std::int64_t parts = 0;
  const std::int64_t before = bytes_read();
  for (std::size_t i = 0; i < model.source->tensors().size(); ++i) {
    const WeightTensor& tensor = model.source->tensors()[i];
    const std::int64_t at_once = tensor.packed ? 1 : tensor.units;
    std::vector<std::byte> out(static_cast<std::size_t>(at_once * tensor.unit.n));
    for (std::int64_t first = 0; first < tensor.units; first += at_once, ++parts) {
      model.source->fill(i, first, out);
    }
  }
  EXPECT_GT(parts, 2 * 1024 / 16);
  const auto size =
      static_cast<std::int64_t>(std::filesystem::file_size(directory.path() / "model.safetensors"));
  EXPECT_LT(bytes_read() - before, size + size / 10);
}

}  // namespace
}  // namespace poise
