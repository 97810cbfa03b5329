#pragma once
// Reads config.json (and generation_config.json) of a HuggingFace model directory into what the
// three processes need. What the fields mean is the family's (common/families/family.h). Absent fields
// have transformers' defaults. The file is not trusted: every
// size is bounded, so that products of two sizes fit 64 bits, and code it names is never run. A bad
// value is refused with one sentence that names file and field. Pure, except that it reads the two
// files.

#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "common/dtype.h"
#include "common/families/family.h"
#include "common/model_shape.h"
#include "common/units.h"

namespace poise {

struct ModelConfig {
  const Family* family;  // what reads its fields and names its tensors
  ModelShape shape;
  std::optional<DType> declared;  // `dtype`, formerly `torch_dtype`
  std::vector<TokenId> eos;       // sorted; empty: this model never ends an answer
  std::optional<TokenId> bos;
  std::string architecture;          // "OPTForCausalLM"
  std::vector<std::string> notices;  // what was ignored, one sentence each
};

ModelConfig read_model_config(const std::filesystem::path& directory);

// The same from documents already read; `generation` may be null. `what` begins each sentence.
ModelConfig model_config_from(const nlohmann::json& config, const nlohmann::json& generation,
                              const std::string& what);

}  // namespace poise
