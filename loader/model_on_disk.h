#pragma once
// Everything about a model directory that can be known without reading weights: config, dtype,
// layout, and a source that has found every tensor. A wrong directory fails here, within a second,
// before any memory is taken.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "common/families/quantization.h"
#include "common/files/sha256.h"
#include "common/formats/kv_format.h"
#include "common/model_config.h"
#include "common/weight_layout.h"
#include "loader/sources/weight_source.h"

namespace poise {

enum class LoadFormat { from_files, dummy };

struct ModelOnDisk {
  ModelConfig config;
  DType dtype;
  WeightLayout layout;
  std::unique_ptr<WeightSource> source;
  std::vector<std::string> notices;
};

// How a user wants it loaded.
struct LoadOptions {
  std::optional<DType> dtype;  // nothing: auto
  LoadFormat format = LoadFormat::from_files;
  std::uint64_t seed = 0;  // of dummy weights
  Quantization quantization = Quantization::automatic;
  PackWeights pack_weights = PackWeights::off;
};

ModelOnDisk open_model(const std::filesystem::path& directory, const LoadOptions& options);

// What a run of it needs, as JSON for `poise doctor`: "dtype", "codes" of the packed matrices ("" where
// there are none), and bytes: "weights", and of a token in all layers "kv" and "act".
std::string needs_json(const ModelOnDisk& model, KvFormat kv_format);

// The model's fingerprint in Hello and manifests: SHA-256 over shape, dtype, special tokens and the
// digest of the weights' bytes.
Digest model_fingerprint(const ModelConfig& config, DType dtype, const Digest& weights);

}  // namespace poise
