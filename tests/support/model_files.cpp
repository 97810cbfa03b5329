#include "tests/support/model_files.h"

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <numeric>
#include <random>

#include "common/files/json.h"
#include "common/trouble.h"

namespace poise::testing_support {
namespace {

std::string stored_name(DType dtype) {
  return dtype == DType::float32 ? "F32" : dtype == DType::float16 ? "F16" : "BF16";
}

template <typename T>
void append(std::string& bytes, const T& value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
}

class WeightMaker {
 public:
  explicit WeightMaker(std::uint32_t seed) : random_(seed) {}

  void add(const std::string& name, std::vector<std::int64_t> shape) {
    const auto count = std::accumulate(shape.begin(), shape.end(), std::int64_t{1},
                                       [](std::int64_t a, std::int64_t b) { return a * b; });
    NamedValues tensor{.shape = std::move(shape)};
    for (std::int64_t i = 0; i < count; ++i) {
      // Plain arithmetic on raw random bits: the same on every standard library.
      tensor.values.push_back(static_cast<float>(random_() % 2001) / 10000.0F - 0.1F);
    }
    tensors_.emplace(name, std::move(tensor));
  }
  void add_linear(const std::string& name, std::int64_t rows, std::int64_t cols, bool bias) {
    add(name + ".weight", {rows, cols});
    if (bias) {
      add(name + ".bias", {rows});
    }
  }
  void add_norm(const std::string& name, std::int64_t width, bool affine) {
    if (affine) {
      add(name + ".weight", {width});
      add(name + ".bias", {width});
    }
  }
  std::map<std::string, NamedValues> take() { return std::move(tensors_); }

 private:
  std::mt19937 random_;
  std::map<std::string, NamedValues> tensors_;
};

}  // namespace

TempDirectory::TempDirectory() {
  std::string pattern = (std::filesystem::temp_directory_path() / "poise_test_XXXXXX").string();
  check(mkdtemp(pattern.data()) != nullptr, "a temporary directory can be made");
  path_ = pattern;
}

TempDirectory::~TempDirectory() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

void write_file(const std::filesystem::path& path, const std::string& bytes) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  check(file.good(), "a test's file can be written");
}

std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  check(file.good(), "a test's file can be read");
  return {std::istreambuf_iterator<char>(file), {}};
}

FileTensor file_tensor(const std::string& name, DType dtype, const std::vector<std::int64_t>& shape,
                       const std::vector<float>& values) {
  FileTensor tensor{.name = name, .dtype = stored_name(dtype), .shape = shape};
  for (const float value : values) {
    switch (dtype) {
      case DType::float32:
        append(tensor.bytes, value);
        break;
      case DType::float16:
        append(tensor.bytes, to_half(value));
        break;
      case DType::bfloat16:
        append(tensor.bytes, to_bfloat16(value));
        break;
    }
  }
  return tensor;
}

std::string safetensors_header(const std::vector<FileTensor>& tensors) {
  nlohmann::json header{{"__metadata__", {{"format", "pt"}}}};
  std::size_t offset = 0;
  for (const FileTensor& tensor : tensors) {
    header[tensor.name] = {{"dtype", tensor.dtype},
                           {"shape", tensor.shape},
                           {"data_offsets", {offset, offset + tensor.bytes.size()}}};
    offset += tensor.bytes.size();
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  return text;
}

std::string safetensors_with_header(const std::string& header, const std::string& data) {
  std::string bytes;
  append(bytes, static_cast<std::uint64_t>(header.size()));
  return bytes + header + data;
}

std::string safetensors_bytes(const std::vector<FileTensor>& tensors) {
  std::string data;
  for (const FileTensor& tensor : tensors) {
    data += tensor.bytes;
  }
  return safetensors_with_header(safetensors_header(tensors), data);
}

ModelShape tiny_shape() {
  return {.num_hidden_layers = 2,
          .hidden_size = 32,
          .ffn_dim = 48,
          .num_attention_heads = 4,
          .num_key_value_heads = 4,
          .head_dim = 8,
          .vocab_size = 61,
          .max_position_embeddings = 40,
          .position_offset = 2,
          .word_embed_proj_dim = 32,
          .activation_function = Activation::relu,
          .norm_epsilon = 1e-5F,
          .do_layer_norm_before = 1,
          .qkv_bias = 1,
          .output_bias = 1,
          .mlp_bias = 1,
          .layer_norm_elementwise_affine = 1,
          .has_final_layer_norm = 1,
          .tie_word_embeddings = 1,
          .learned_positions = 1};
}

std::string config_json(const ModelShape& shape, const std::string& dtype_name) {
  constexpr const char* kActivations[] = {"relu", "gelu", "gelu_new"};
  nlohmann::json config{
      {"model_type", "opt"},
      {"architectures", {"OPTForCausalLM"}},
      {"num_hidden_layers", shape.num_hidden_layers},
      {"hidden_size", shape.hidden_size},
      {"ffn_dim", shape.ffn_dim},
      {"num_attention_heads", shape.num_attention_heads},
      {"vocab_size", shape.vocab_size},
      {"max_position_embeddings", shape.max_position_embeddings},
      {"word_embed_proj_dim", shape.word_embed_proj_dim},
      {"activation_function", kActivations[static_cast<int>(shape.activation_function)]},
      {"do_layer_norm_before", shape.do_layer_norm_before != 0},
      {"enable_bias", shape.qkv_bias != 0},
      {"layer_norm_elementwise_affine", shape.layer_norm_elementwise_affine != 0},
      {"_remove_final_layer_norm",
       shape.do_layer_norm_before != 0 && shape.has_final_layer_norm == 0},
      {"tie_word_embeddings", shape.tie_word_embeddings != 0}};
  if (!dtype_name.empty()) {
    config["dtype"] = dtype_name;
  }
  return config.dump(2);
}

std::map<std::string, NamedValues> tiny_weights(const TinyModel& model) {
  const ModelShape& shape = model.shape;
  const std::int64_t h = shape.hidden_size;
  const bool bias = shape.qkv_bias != 0;
  const bool affine = shape.layer_norm_elementwise_affine != 0;
  WeightMaker make(model.seed);
  make.add(model.prefix + "embed_tokens.weight", {shape.vocab_size, shape.word_embed_proj_dim});
  make.add(model.prefix + "embed_positions.weight", {shape.max_position_embeddings + 2, h});
  if (shape.word_embed_proj_dim != h) {
    make.add_linear(model.prefix + "project_in", h, shape.word_embed_proj_dim, false);
    make.add_linear(model.prefix + "project_out", shape.word_embed_proj_dim, h, false);
  }
  make.add_norm(model.prefix + "final_layer_norm", h, affine && shape.has_final_layer_norm != 0);
  if (shape.tie_word_embeddings == 0) {
    make.add("lm_head.weight", {shape.vocab_size, shape.word_embed_proj_dim});
  }
  for (int layer = 0; layer < shape.num_hidden_layers; ++layer) {
    const std::string prefix = fmt::format("{}layers.{}.", model.prefix, layer);
    for (const char* name : {"q_proj", "k_proj", "v_proj", "out_proj"}) {
      make.add_linear(prefix + "self_attn." + name, h, h, bias);
    }
    make.add_norm(prefix + "self_attn_layer_norm", h, affine);
    make.add_norm(prefix + "final_layer_norm", h, affine);
    make.add_linear(prefix + "fc1", shape.ffn_dim, h, bias);
    make.add_linear(prefix + "fc2", h, shape.ffn_dim, bias);
  }
  return make.take();
}

void write_model(const std::filesystem::path& directory, const TinyModel& model) {
  write_file(directory / "config.json",
             config_json(model.shape, std::string(name_of(model.stored))));
  std::vector<std::vector<FileTensor>> files(static_cast<std::size_t>(model.shards));
  std::size_t next = 0;
  for (const auto& [name, tensor] : tiny_weights(model)) {
    files[next++ % files.size()].push_back(
        file_tensor(name, model.stored, tensor.shape, tensor.values));
  }
  if (model.shards == 1) {
    write_file(directory / "model.safetensors", safetensors_bytes(files.front()));
    return;
  }
  nlohmann::json weight_map;
  for (std::size_t i = 0; i < files.size(); ++i) {
    const std::string file = fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, files.size());
    write_file(directory / file, safetensors_bytes(files[i]));
    for (const FileTensor& tensor : files[i]) {
      weight_map[tensor.name] = file;
    }
  }
  write_file(directory / "model.safetensors.index.json",
             nlohmann::json{{"weight_map", weight_map}}.dump());
}

}  // namespace poise::testing_support
