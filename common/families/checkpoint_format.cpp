#include "common/families/checkpoint_format.h"

#include <algorithm>

#include "common/families/family.h"
#include "common/trouble.h"
#include "common/weight_layout.h"

namespace poise {
namespace {

constexpr std::string_view kMethods = "supported are gptq, awq, compressed-tensors and fp8";

std::int32_t bits_of(const JsonObject& config, std::string_view field, bool eight) {
  const std::int64_t bits = config.integer(field, {}).value_or(0);
  if (bits != 4 && (bits != 8 || !eight)) {
    config.refuse(field,
                  fmt::format("is {}: {} are supported", bits, eight ? "4 and 8 bits" : "4 bits"));
  }
  return static_cast<std::int32_t>(bits);
}

Codes codes_of(std::int32_t bits) { return bits == 4 ? Codes::int4 : Codes::int8; }

// -1 and absent: all inputs of a row.
std::int32_t group_of(const JsonObject& config, std::string_view field) {
  const std::int64_t group = config.integer(field, {}).value_or(-1);
  if (group != -1 && (group < kMinPackedGroup || group > kMaxPackedGroup)) {
    config.refuse(field, fmt::format("is {}: it must be -1 or {} to {}", group, kMinPackedGroup,
                                     kMaxPackedGroup));
  }
  return group == -1 ? 0 : static_cast<std::int32_t>(group);
}

void add_names(const JsonObject& config, std::string_view field, std::vector<std::string>& into) {
  const nlohmann::json* names = config.find(field);
  if (names == nullptr) {
    return;
  }
  if (!names->is_array()) {
    config.refuse(field, "must be a list of names, not " + described(*names));
  }
  for (const nlohmann::json& name : *names) {
    if (!name.is_string()) {
      config.refuse(field, "must hold names, not " + described(name));
    }
    into.push_back(name.get<std::string>());
  }
}

CheckpointFormat gptq(const JsonObject& config) {
  const std::string form = config.string("checkpoint_format").value_or("gptq");
  if (form != "gptq" && form != "gptq_v2") {
    config.refuse("checkpoint_format",
                  fmt::format("is \"{}\": gptq and gptq_v2 are supported", form));
  }
  const bool symmetric = config.boolean("sym").value_or(true);
  const std::int32_t group = group_of(config, "group_size");
  const bool act_order = config.boolean("desc_act").value_or(false);
  return {.stored = StoredCodes::gptq,
          .packed = {.codes = codes_of(bits_of(config, "bits", true)),
                     .scale_dtype = DType::float16,
                     .group = group,
                     .zero_points = symmetric ? 0U : 1U,
                     .input_groups = act_order && group > 0 ? 1U : 0U},
          .zero_offset = form == "gptq" ? 1 : 0};
}

CheckpointFormat awq(const JsonObject& config) {
  const std::string version = config.string("version").value_or("gemm");
  if (version != "gemm" && version != "GEMM") {
    config.refuse("version", fmt::format("is \"{}\": gemm is supported", version));
  }
  return {.stored = StoredCodes::awq,
          .packed = {.codes = codes_of(bits_of(config, "bits", false)),
                     .scale_dtype = DType::float16,
                     .group = group_of(config, "group_size"),
                     .zero_points = config.boolean("zero_point").value_or(true) ? 1U : 0U}};
}

// The sizes of a block, (rows, inputs); nothing where the field is absent.
std::optional<std::pair<std::int32_t, std::int32_t>> block_of(const JsonObject& config,
                                                              std::string_view field) {
  const auto sizes = config.integers(field, {.min = kMinPackedGroup, .max = kMaxPackedGroup});
  if (!sizes) {
    return std::nullopt;
  }
  if (sizes->size() != 2) {
    config.refuse(field, "must be a list of two sizes");
  }
  return std::pair(static_cast<std::int32_t>((*sizes)[0]), static_cast<std::int32_t>((*sizes)[1]));
}

CheckpointFormat fp8(const JsonObject& config) {
  const std::string form = config.string("fmt").value_or("e4m3");
  if (form != "e4m3") {
    config.refuse("fmt", fmt::format("is \"{}\": e4m3 is supported", form));
  }
  const auto block = block_of(config, "weight_block_size");
  return {.stored = StoredCodes::bytes,
          .packed = {.codes = Codes::float8,
                     .scale_dtype = DType::float32,
                     .group = block ? block->second : 0},
          .block_rows = block ? block->first : 0,
          .quantizes_inputs = config.has("activation_scheme")};
}

// A group's names of modules; none where it names all linear ones.
std::vector<std::string> targets_of(const JsonObject& group) {
  std::vector<std::string> targets;
  add_names(group, "targets", targets);
  if (targets.empty()) {
    group.refuse("targets", "must name modules");
  }
  return std::ranges::find(targets, "Linear") == targets.end() ? targets
                                                                : std::vector<std::string>();
}

// Parts of the format that change what a layer computes.
void refuse_transforms(const JsonObject& config) {
  const nlohmann::json* transforms = config.find("transform_config");
  if (transforms != nullptr && !transforms->empty()) {
    config.refuse("transform_config", "is there: weights that were rotated are not supported");
  }
  if (const auto sparsity = config.object("sparsity_config")) {
    const std::string form = sparsity->string("format").value_or("dense");
    if (form != "dense") {
      sparsity->refuse("format", fmt::format("is \"{}\": only dense is supported", form));
    }
  }
}

CheckpointFormat of_group(const JsonObject& config, const JsonObject& group) {
  const auto weights = group.object("weights");
  if (!weights) {
    group.refuse("weights", "must be there");
  }
  const std::string form =
      group.string("format").value_or(config.string("format").value_or(std::string()));
  const std::string type = weights->string("type").value_or("int");
  const std::string strategy = weights->string("strategy").value_or("tensor");
  CheckpointFormat found{.stored = StoredCodes::bytes, .packed = {}};
  found.packed.scale_dtype = DType::bfloat16;
  found.quantizes_inputs = group.has("input_activations");
  const bool symmetric = weights->boolean("symmetric").value_or(true);
  if (form == "pack-quantized" && type == "int") {
    found.stored = StoredCodes::packed_integers;
    found.packed.codes = codes_of(bits_of(*weights, "num_bits", true));
    found.packed.zero_points = symmetric ? 0 : 1;
  } else if ((form == "float-quantized" || form == "naive-quantized" || form == "int-quantized") &&
             weights->integer("num_bits", {}).value_or(0) == 8 && symmetric) {
    found.packed.codes = type == "float" ? Codes::float8 : Codes::int8;
  } else {
    config.refuse(
        "format",
        fmt::format("is \"{}\" of {} {} bits{}: pack-quantized (int, 4 and 8 bits), "
                    "int-quantized (symmetric, 8 bits) and float-quantized (8 bits) are supported",
                    form, type, weights->integer("num_bits", {}).value_or(0),
                    symmetric ? "" : ", asymmetric"));
  }
  if (strategy == "group") {
    found.packed.group = group_of(*weights, "group_size");
  } else if (strategy == "block") {
    const auto block = block_of(*weights, "block_structure");
    if (!block || found.stored != StoredCodes::bytes) {
      weights->refuse("block_structure", "must be a list of two sizes");
    }
    found.block_rows = block->first;
    found.packed.group = block->second;
  } else if (strategy != "channel" && strategy != "tensor") {
    weights->refuse(
        "strategy",
        fmt::format("is \"{}\": group, channel, tensor and block are supported", strategy));
  }
  const std::string order = weights->string("actorder").value_or("");
  if (order != "" && order != "static" && order != "weight" && order != "group" &&
      order != "dynamic") {
    weights->refuse("actorder", fmt::format("is \"{}\": group and weight are supported", order));
  }
  const bool act_order = (order == "group" || order == "dynamic") && found.packed.group > 0;
  if (act_order && found.stored != StoredCodes::packed_integers) {
    weights->refuse("actorder", fmt::format("is \"{}\": only pack-quantized has it", order));
  }
  found.packed.input_groups = act_order ? 1 : 0;
  return found;
}

// All groups of layers, which have one format.
CheckpointFormat compressed_tensors(const JsonObject& config) {
  refuse_transforms(config);
  constexpr std::size_t kMostGroups = 64;
  const auto groups = config.object("config_groups");
  if (!groups || groups->json().empty() || groups->json().size() > kMostGroups) {
    config.refuse("config_groups", fmt::format("must hold 1 to {} groups", kMostGroups));
  }
  std::optional<CheckpointFormat> found;
  bool all_modules = false;
  for (const auto& [name, unused] : groups->json().items()) {
    const auto group = groups->object(name);
    if (!group) {
      config.refuse("config_groups", "must hold objects");
    }
    CheckpointFormat one = of_group(config, *group);
    one.targets = targets_of(*group);
    all_modules = all_modules || one.targets.empty();
    if (!found) {
      found = std::move(one);
      continue;
    }
    if (one.stored != found->stored || one.packed != found->packed ||
        one.block_rows != found->block_rows) {
      config.refuse("config_groups",
                    fmt::format("must hold groups of one format: {} differs from the first, and "
                                "layers of different formats are not supported",
                                shown(name)));
    }
    found->quantizes_inputs = found->quantizes_inputs || one.quantizes_inputs;
    found->targets.insert(found->targets.end(), one.targets.begin(), one.targets.end());
  }
  if (all_modules) {
    found->targets.clear();
  }
  return *found;
}

// Whether an entry of the config means this module ("model.layers.0.mlp.up_proj" without its prefix).
bool means(const std::string& entry, std::string_view module) {
  return entry.find(module) != std::string::npos ||
         (!entry.starts_with("re:") && module.find(entry) != std::string_view::npos);
}

// A pattern means a module whose last name it holds: patterns are not run, and the tensors decide.
bool targets(const std::string& entry, std::string_view module) {
  const std::string_view last = module.substr(module.rfind('.') + 1);
  return means(entry, module) || (entry.starts_with("re:") && entry.find(last) != std::string::npos);
}

}  // namespace

std::optional<CheckpointFormat> checkpoint_format(const JsonObject& config) {
  std::optional<JsonObject> object = config.object("quantization_config");
  if (!object) {
    object = config.object("compression_config");
  }
  if (!object) {
    return std::nullopt;
  }
  const std::string method = object->string("quant_method").value_or("");
  std::optional<CheckpointFormat> found;
  if (method == "gptq") {
    found = gptq(*object);
  } else if (method == "awq") {
    found = awq(*object);
  } else if (method == "compressed-tensors") {
    found = compressed_tensors(*object);
  } else if (method == "fp8") {
    found = fp8(*object);
  } else {
    object->refuse("quant_method", fmt::format("is \"{}\": {}", method, kMethods));
  }
  add_names(*object, "modules_to_not_convert", found->left_out);
  add_names(*object, "ignore", found->left_out);
  return found;
}

ModelShape packed_as(const ModelShape& plain, const CheckpointFormat& format,
                     const Family& family) {
  ModelShape shape = plain;
  shape.packed_weights = packable_weights(plain);
  for (const TensorName& name : family.layer) {
    const std::string_view module = name.name.substr(0, name.name.rfind('.'));
    const bool targeted =
        format.targets.empty() ||
        std::ranges::any_of(format.targets, [&](const std::string& entry) {
          return targets(entry, module);
        });
    if (!targeted || std::ranges::any_of(format.left_out, [&](const std::string& entry) {
          return means(entry, module);
        })) {
      shape.packed_weights &= ~bit_of(name.weight);
    }
  }
  if (shape.packed_weights != 0) {
    shape.packed = format.packed;
  }
  return shape;
}

}  // namespace poise
