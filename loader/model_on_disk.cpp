#include "loader/model_on_disk.h"

#include <string_view>
#include <utility>

#include "common/blocks.h"
#include "common/files/json.h"
#include "common/files/regular_file.h"
#include "common/trouble.h"
#include "loader/sources/checkpoint_source.h"
#include "loader/sources/dummy_source.h"
#include "loader/sources/packed_checkpoint_source.h"
#include "loader/sources/packing_source.h"
#include "loader/tensor_list.h"

namespace poise {
namespace {

template <typename T>
void add(Sha256& hash, const T& value) {
  hash.update(std::as_bytes(std::span(&value, 1)));
}

void add_what_stays_plain(ModelOnDisk& model) {
  std::string names;
  for (const Weight weight : kLayerMatrices) {
    if ((model.config.shape.packed_weights & bit_of(weight)) == 0) {
      names += (names.empty() ? "" : ", ") + std::string(name_of(weight));
    }
  }
  if (!names.empty()) {
    model.notices.push_back(
        fmt::format("not packed, because a tensor of it has no multiple of {} outputs: {}",
                    kPackedRows, names));
  }
}

void add_notices(ModelOnDisk& model, const Checkpoint& checkpoint, const CheckpointSource& source,
                 const LoadOptions& options) {
  const auto& of_files = checkpoint.notices();
  model.notices.insert(model.notices.end(), of_files.begin(), of_files.end());
  if (source.unneeded()) {
    model.notices.push_back(*source.unneeded());
  }
  if (source.converted() && !options.dtype) {  // else it was asked for
    model.notices.push_back(*source.converted());
  }
}

std::optional<CheckpointFormat> read_checkpoint_format(const std::filesystem::path& directory) {
  const std::filesystem::path path = directory / "config.json";
  const nlohmann::json config = read_json_file(path);
  return checkpoint_format(JsonObject(config, shown(path.string(), 300)));
}

void refuse_quantization(const LoadOptions& options, const std::string& what) {
  if (options.quantization != Quantization::automatic) {
    fail("{}: the checkpoint is quantised already: --quantization {} is for plain ones", what,
         name_of(options.quantization));
  }
}

// The rest of a model whose checkpoint is quantised.
void open_packed(ModelOnDisk& model, const CheckpointFormat& format,
                 std::shared_ptr<const Checkpoint> checkpoint, const LoadOptions& options,
                 const std::string& what) {
  refuse_quantization(options, what);
  model.config.shape = shape_in_checkpoint(model.config, format, *checkpoint, what);
  model.layout = weight_layout(model.config.shape, model.dtype);
  auto source = std::make_unique<PackedCheckpointSource>(checkpoint, model.config, format,
                                                         model.layout, model.dtype, what);
  add_notices(model, *checkpoint, source->plain(), options);
  if (format.quantizes_inputs) {
    model.notices.push_back(
        "the checkpoint asks for quantised inputs too: its weights are used, inputs "
        "are not quantised");
  }
  model.source = std::move(source);
}

}  // namespace

ModelOnDisk open_model(const std::filesystem::path& directory, const LoadOptions& options) {
  const std::string what = shown(directory.string(), 300);
  ModelOnDisk model{.config = read_model_config(directory)};
  model.notices = model.config.notices;
  const bool dummy = options.format == LoadFormat::dummy;
  const auto checkpoint = dummy ? nullptr : std::make_shared<const Checkpoint>(directory);
  model.dtype = kept_dtype(options.dtype, model.config, checkpoint.get(), what);
  const auto format = dummy ? std::nullopt : read_checkpoint_format(directory);
  if (format) {
    open_packed(model, *format, checkpoint, options, what);
    return model;
  }
  if (dummy && model.config.shape.packed.is_packed()) {  // as its config says
    refuse_quantization(options, what);
    model.layout = weight_layout(model.config.shape, model.dtype);
    model.source = std::make_unique<DummySource>(*model.config.family, model.layout, model.dtype,
                                                 options.seed, model.config.shape.packed);
    return model;
  }
  model.config.shape = unpacked(model.config.shape);
  const WeightLayout plain = weight_layout(model.config.shape, model.dtype);
  if (dummy) {
    model.source =
        std::make_unique<DummySource>(*model.config.family, plain, model.dtype, options.seed);
  } else {
    auto source =
        std::make_unique<CheckpointSource>(checkpoint, model.config, plain, model.dtype, what);
    add_notices(model, *checkpoint, *source, options);
    model.source = std::move(source);
  }
  model.config.shape =
      quantized(model.config.shape, options.quantization, options.pack_weights, model.dtype);
  model.layout = weight_layout(model.config.shape, model.dtype);
  if (model.config.shape.packed.is_packed()) {
    const std::string prefix = dummy ? std::string(model.config.family->prefixes.front())
                                     : tensor_prefix(*model.config.family, *checkpoint, what);
    model.source = std::make_unique<PackingSource>(
        std::move(model.source), tensor_list(*model.config.family, model.layout, prefix),
        model.config.shape.packed, model.dtype);
  }
  if (rounds(options.quantization) || model.config.shape.packed.is_packed()) {
    add_what_stays_plain(model);
  }
  return model;
}

std::string needs_json(const ModelOnDisk& model, KvFormat kv_format) {
  const ModelShape& shape = model.config.shape;
  const BlockSizes sizes = block_sizes(shape, model.dtype, kv_format);
  const nlohmann::json needs{
      {"dtype", name_of(model.dtype)},
      {"codes", shape.packed.is_packed() ? name_of(shape.packed.codes) : std::string_view()},
      {"weights", model.layout.total().n},
      {"kv", sizes.kv_row.n * shape.num_hidden_layers},
      {"act", sizes.act_row.n * shape.num_hidden_layers}};
  return needs.dump();
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
