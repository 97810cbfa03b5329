#pragma once
// Tiny model directories for tests: safetensors files, configs and indices written from scratch,
// sound or broken at will. Shares no code with the loader, so that the two can disagree. Numbers are
// seeded; everything lies in a directory that removes itself.

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "common/dtype.h"
#include "common/model_shape.h"

namespace poise::testing_support {

class TempDirectory {
 public:
  TempDirectory();  // mode 0700
  ~TempDirectory();
  TempDirectory(const TempDirectory&) = delete;
  TempDirectory& operator=(const TempDirectory&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

void write_file(const std::filesystem::path& path, const std::string& bytes);
std::string read_file(const std::filesystem::path& path);

struct FileTensor {
  std::string name;
  std::string dtype;  // "F32", "F16", "BF16"
  std::vector<std::int64_t> shape;
  std::string bytes;
};

// `values` in `dtype`, rounded as the dtype asks.
FileTensor file_tensor(const std::string& name, DType dtype, const std::vector<std::int64_t>& shape,
                       const std::vector<float>& values);

// | length | header | bytes |, and the header alone.
std::string safetensors_header(const std::vector<FileTensor>& tensors);
std::string safetensors_with_header(const std::string& header, const std::string& data);
std::string safetensors_bytes(const std::vector<FileTensor>& tensors);

struct TinyModel {
  ModelShape shape;
  DType stored = DType::float32;
  std::string prefix = "model.decoder.";
  int shards = 1;
  std::uint32_t seed = 1;
};

// An OPT shape of a few kilobytes: 2 layers, width 32, 4 heads, vocabulary 61.
ModelShape tiny_shape();
std::string config_json(const ModelShape& shape, const std::string& dtype_name);
// Every tensor of such a model with its values, by the names and shapes HuggingFace gives them.
struct NamedValues {
  std::vector<std::int64_t> shape;
  std::vector<float> values;
};
std::map<std::string, NamedValues> tiny_weights(const TinyModel& model);
// config.json and one or more *.safetensors (with an index where there are several).
void write_model(const std::filesystem::path& directory, const TinyModel& model);

}  // namespace poise::testing_support
