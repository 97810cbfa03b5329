#include "common/model_config.h"

#include <algorithm>
#include <string_view>

#include "common/families/checkpoint_format.h"
#include "common/families/config_fields.h"
#include "common/files/json.h"
#include "common/files/json_file.h"
#include "common/trouble.h"

namespace poise {
namespace {

constexpr std::int64_t kMaxTokenId = 0x7fffffff;
constexpr std::size_t kMaxEos = 256;
constexpr Bytes kMaxConfig = kMiB * 4;

std::string supported() {
  std::string names;
  for (const Family* family : families()) {
    names += fmt::format("{}{} (model_type {})", names.empty() ? "" : ", ", family->architecture,
                         family->model_type);
  }
  return names;
}

struct Class {
  const Family* family;
  std::string name;
};

// The class this checkpoint is of; fails for those we do not run, before any other field is read.
Class class_of(const JsonObject& config) {
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
  const std::string type = config.string("model_type").value_or("");
  for (const Family* family : families()) {
    if (!type.empty() && type != family->model_type) {
      continue;
    }
    for (const std::string_view known : {family->architecture, family->headless}) {
      if (std::ranges::find(classes, known) != classes.end()) {
        return {family, std::string(known)};
      }
    }
    if (classes.empty() && !type.empty()) {
      return {family, std::string(family->architecture)};
    }
  }
  for (const Family* family : families()) {
    if (std::ranges::find(classes, family->architecture) != classes.end()) {
      config.refuse("architectures",
                    fmt::format("is {}, but \"model_type\" is {}, not {}", family->architecture,
                                shown(type), family->model_type));
    }
  }
  if (classes.empty() && type.empty()) {
    fail("{}: says neither \"architectures\" nor \"model_type\"; supported are {}", config.what(),
         supported());
  }
  fail("{}: {}{} is not supported; supported are {}", config.what(),
       classes.empty() ? "model_type " : "the architecture ",
       shown(classes.empty() ? type : classes.front()), supported());
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

// The ids that end an answer, as the first document that speaks of them has it.
std::vector<TokenId> eos_of(const std::vector<JsonObject>& documents, const Family& family,
                            std::int32_t vocab_size, std::vector<std::string>& notices) {
  std::vector<std::int64_t> ids;
  if (family.eos >= 0) {
    ids.push_back(family.eos);
  }
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
  const Class found = class_of(object);
  model.architecture = found.name;
  model.family = found.family;
  if (object.has("auto_map")) {
    model.notices.push_back(what + ": \"auto_map\" names code to run; it is ignored");
  }
  model.shape = found.family->shape(object);
  if (const auto format = checkpoint_format(object)) {
    model.shape = packed_as(model.shape, *format, *found.family);
  }
  model.declared = declared_dtype(object);

  std::vector<JsonObject> documents;
  if (!generation.is_null()) {
    documents.emplace_back(generation, "generation_config.json");
  }
  documents.push_back(object);
  model.eos = eos_of(documents, *model.family, model.shape.vocab_size, model.notices);
  const std::int64_t bos =
      config.contains("bos_token_id")
          ? object.integer("bos_token_id", {.min = 0, .max = kMaxTokenId}).value_or(-1)
          : model.family->bos;
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
