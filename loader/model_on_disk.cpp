#include "loader/model_on_disk.h"

#include <string_view>
#include <utility>

#include "common/files/regular_file.h"
#include "loader/checkpoint_source.h"
#include "loader/dummy_source.h"

namespace poise {
namespace {

template <typename T>
void add(Sha256& hash, const T& value) {
  hash.update(std::as_bytes(std::span(&value, 1)));
}

}  // namespace

ModelOnDisk open_model(const std::filesystem::path& directory, std::optional<DType> dtype,
                       LoadFormat format, std::uint64_t seed) {
  const std::string what = shown(directory.string(), 300);
  ModelOnDisk model{.config = read_model_config(directory)};
  model.notices = model.config.notices;
  if (format == LoadFormat::dummy) {
    model.dtype = kept_dtype(dtype, model.config, nullptr, what);
    model.layout = weight_layout(model.config.shape, model.dtype);
    model.source =
        std::make_unique<DummySource>(*model.config.family, model.layout, model.dtype, seed);
    return model;
  }
  const auto checkpoint = std::make_shared<const Checkpoint>(directory);
  model.dtype = kept_dtype(dtype, model.config, checkpoint.get(), what);
  model.layout = weight_layout(model.config.shape, model.dtype);
  auto source =
      std::make_unique<CheckpointSource>(checkpoint, model.config, model.layout, model.dtype, what);
  const auto& of_files = checkpoint->notices();
  model.notices.insert(model.notices.end(), of_files.begin(), of_files.end());
  if (source->unneeded()) {
    model.notices.push_back(*source->unneeded());
  }
  if (source->converted() && !dtype) {  // else it was asked for
    model.notices.push_back(*source->converted());
  }
  model.source = std::move(source);
  return model;
}

Digest model_fingerprint(const ModelConfig& config, DType dtype, const Digest& weights) {
  constexpr std::string_view kName = "poise model 1";
  Sha256 hash;
  hash.update(std::as_bytes(std::span(kName)));
  add(hash, config.shape);
  add(hash, dtype);
  add(hash, config.bos.value_or(-1));
  for (const TokenId eos : config.eos) {
    add(hash, eos);
  }
  add(hash, weights);
  return hash.finish();
}

}  // namespace poise
