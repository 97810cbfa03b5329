#include "common/model_config.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "common/files/json_file.h"
#include "common/trouble.h"

namespace poise {
namespace {

// Far above any model there is, far below what makes the product of two sizes overflow.
constexpr std::int64_t kMaxLayers = 1024;
constexpr std::int64_t kMaxWidth = 1 << 16;
constexpr std::int64_t kMaxFfn = 1 << 18;
constexpr std::int64_t kMaxVocabulary = 1 << 23;
constexpr std::int64_t kMaxPositions = 1 << 24;
constexpr std::int64_t kMaxTokenId = 0x7fffffff;
constexpr std::size_t kMaxEos = 256;
constexpr Bytes kMaxConfig = kMiB * 4;

constexpr std::string_view kSupported = "OPTForCausalLM";

constexpr std::array<std::pair<std::string_view, Activation>, 8> kActivations{{
    {"relu", Activation::relu},
    {"gelu", Activation::gelu},
    {"gelu_python", Activation::gelu},
    {"gelu_new", Activation::gelu_tanh},
    {"gelu_pytorch_tanh", Activation::gelu_tanh},
    {"gelu_python_tanh", Activation::gelu_tanh},
    {"gelu_accurate", Activation::gelu_tanh},
    {"gelu_fast", Activation::gelu_tanh},
}};

std::int32_t size_field(const JsonObject& config, std::string_view name, std::int64_t otherwise,
                        std::int64_t max) {
  return static_cast<std::int32_t>(
      config.integer(name, {.min = 1, .max = max}).value_or(otherwise));
}

std::uint32_t switch_field(const JsonObject& config, std::string_view name, bool otherwise) {
  return config.boolean(name).value_or(otherwise) ? 1 : 0;
}

// The class this checkpoint is of; fails for those we do not run, before any other field is read.
std::string architecture_of(const JsonObject& config) {
  std::vector<std::string> classes;
  if (const nlohmann::json* field = config.find("architectures")) {
    if (!field->is_array()) {
      config.refuse("architectures", "must be a list of names, not " + described(*field));
    }
    for (const nlohmann::json& name : *field) {
      if (!name.is_string()) {
        config.refuse("architectures", "must hold names, not " + described(name));
      }
      classes.push_back(name.get<std::string>());
    }
  }
  const std::string family = config.string("model_type").value_or("");
  for (const std::string_view known : {"OPTForCausalLM", "OPTModel"}) {
    if (std::ranges::find(classes, known) != classes.end() && (family == "opt" || family.empty())) {
      return std::string(known);
    }
  }
  if (classes.empty() && family == "opt") {
    return std::string(kSupported);
  }
  if (classes.empty() && family.empty()) {
    fail("{}: says neither \"architectures\" nor \"model_type\"; supported is {}", config.what(),
         kSupported);
  }
  fail("{}: {}{} is not supported; supported is {} (model_type opt)", config.what(),
       classes.empty() ? "model_type " : "the architecture ",
       shown(classes.empty() ? family : classes.front()), kSupported);
}

Activation activation_of(const JsonObject& config) {
  const std::string name = config.string("activation_function").value_or("relu");
  const auto* known = std::ranges::find(kActivations, std::string_view(name),
                                        &std::pair<std::string_view, Activation>::first);
  if (known == kActivations.end()) {
    config.refuse(
        "activation_function",
        fmt::format("is \"{}\"; supported are relu, gelu, gelu_new, gelu_pytorch_tanh and "
                    "their synonyms",
                    shown(name)));
  }
  return known->second;
}

std::optional<DType> declared_dtype(const JsonObject& config) {
  for (const std::string_view field : {"dtype", "torch_dtype"}) {
    const auto name = config.string(field);
    if (!name || *name == "auto") {
      continue;
    }
    const auto dtype = dtype_from(*name);
    if (!dtype) {
      config.refuse(field,
                    fmt::format("must be float32, float16 or bfloat16, not \"{}\"", shown(*name)));
    }
    return dtype;
  }
  return std::nullopt;
}

ModelShape shape_of(const JsonObject& config) {
  ModelShape shape{};
  shape.num_hidden_layers = size_field(config, "num_hidden_layers", 12, kMaxLayers);
  shape.hidden_size = size_field(config, "hidden_size", 768, kMaxWidth);
  shape.ffn_dim = size_field(config, "ffn_dim", 3072, kMaxFfn);
  shape.num_attention_heads = size_field(config, "num_attention_heads", 12, kMaxWidth);
  shape.num_key_value_heads = shape.num_attention_heads;
  if (shape.hidden_size % shape.num_attention_heads != 0) {
    config.refuse("hidden_size",
                  fmt::format("is {}, which {} attention heads (\"num_attention_heads\") do not "
                              "divide",
                              shape.hidden_size, shape.num_attention_heads));
  }
  shape.head_dim = shape.hidden_size / shape.num_attention_heads;
  shape.vocab_size = size_field(config, "vocab_size", 50272, kMaxVocabulary);
  shape.max_position_embeddings =
      size_field(config, "max_position_embeddings", 2048, kMaxPositions);
  shape.position_offset = 2;
  shape.word_embed_proj_dim =
      size_field(config, "word_embed_proj_dim", shape.hidden_size, kMaxWidth);
  shape.activation_function = activation_of(config);
  shape.norm_epsilon = 1e-5F;
  shape.do_layer_norm_before = switch_field(config, "do_layer_norm_before", true);
  shape.qkv_bias = switch_field(config, "enable_bias", true);
  shape.output_bias = shape.mlp_bias = shape.qkv_bias;
  shape.layer_norm_elementwise_affine = switch_field(config, "layer_norm_elementwise_affine", true);
  const std::uint32_t removed = switch_field(config, "_remove_final_layer_norm", false);
  shape.has_final_layer_norm = shape.do_layer_norm_before != 0 && removed == 0 ? 1 : 0;
  shape.tie_word_embeddings = switch_field(config, "tie_word_embeddings", true);
  shape.learned_positions = 1;
  return shape;
}

// The ids that end an answer, as the first document that speaks of them has it.
std::vector<TokenId> eos_of(const std::vector<JsonObject>& documents, std::int32_t vocab_size,
                            std::vector<std::string>& notices) {
  std::vector<std::int64_t> ids{2};  // OPTConfig's default
  for (const JsonObject& document : documents) {
    if (document.json().contains("eos_token_id")) {
      ids = document.integers("eos_token_id", {.min = 0, .max = kMaxTokenId})
                .value_or(std::vector<std::int64_t>{});
      if (ids.size() > kMaxEos) {
        document.refuse("eos_token_id",
                        fmt::format("holds {} ids; at most {} are read", ids.size(), kMaxEos));
      }
      break;
    }
  }
  std::vector<TokenId> eos;
  for (const std::int64_t id : ids) {
    if (id < vocab_size) {
      eos.push_back(static_cast<TokenId>(id));
    } else {
      notices.push_back(
          fmt::format("eos_token_id {} lies beyond the vocabulary of {} and can never be sampled",
                      id, vocab_size));
    }
  }
  std::ranges::sort(eos);
  eos.erase(std::unique(eos.begin(), eos.end()), eos.end());
  return eos;
}

void explain_a_missing_config(const std::filesystem::path& directory) {
  std::error_code ignored;
  const std::string name = shown(directory.string(), 300);
  if (!std::filesystem::exists(directory, ignored)) {
    fail(
        "the model {} is not there: a directory with config.json and *.safetensors is needed, "
        "names on a hub are not fetched",
        name);
  }
  if (!std::filesystem::is_directory(directory, ignored)) {
    fail("the model {} is a file: the directory with config.json and *.safetensors is needed",
         name);
  }
  const auto status = std::filesystem::symlink_status(directory / "config.json", ignored);
  if (status.type() == std::filesystem::file_type::not_found) {
    fail("the model directory {} has no config.json: is it a HuggingFace model directory?", name);
  }
}

}  // namespace

ModelConfig model_config_from(const nlohmann::json& config, const nlohmann::json& generation,
                              const std::string& what) {
  const JsonObject object(config, what);
  ModelConfig model;
  model.architecture = architecture_of(object);
  if (object.has("quantization_config")) {
    object.refuse("quantization_config",
                  "is there: quantised checkpoints are not supported, take the float16 one");
  }
  if (object.has("auto_map")) {
    model.notices.push_back(what + ": \"auto_map\" names code to run; it is ignored");
  }
  model.shape = shape_of(object);
  model.declared = declared_dtype(object);

  std::vector<JsonObject> documents;
  if (!generation.is_null()) {
    documents.emplace_back(generation, "generation_config.json");
  }
  documents.push_back(object);
  model.eos = eos_of(documents, model.shape.vocab_size, model.notices);
  const std::int64_t bos =
      config.contains("bos_token_id")
          ? object.integer("bos_token_id", {.min = 0, .max = kMaxTokenId}).value_or(-1)
          : 2;
  if (bos >= 0 && bos < model.shape.vocab_size) {
    model.bos = static_cast<TokenId>(bos);
  }
  return model;
}

ModelConfig read_model_config(const std::filesystem::path& directory) {
  explain_a_missing_config(directory);
  const JsonLimits limits{.size = kMaxConfig, .depth = 32};
  const std::filesystem::path path = directory / "config.json";
  const nlohmann::json config = read_json_file(path, limits);
  nlohmann::json generation;
  const std::filesystem::path generation_path = directory / "generation_config.json";
  std::error_code ignored;
  if (std::filesystem::symlink_status(generation_path, ignored).type() !=
      std::filesystem::file_type::not_found) {
    generation = read_json_file(generation_path, limits);
  }
  return model_config_from(config, generation, shown(path.string(), 300));
}

}  // namespace poise
