#include "common/families/llama_like.h"

#include <algorithm>

#include "common/families/config_fields.h"
#include "common/families/rotary_fields.h"
#include "common/trouble.h"

namespace poise {
namespace {

// Of other families' configs, which must not be taken for this layout.
void refuse_what_is_not_there(const JsonObject& config) {
  for (const std::string_view experts : {"num_local_experts", "num_experts", "n_routed_experts"}) {
    if (config.integer(experts, {.min = 0}).value_or(0) > 0) {
      config.refuse(experts, "is there: layers with experts are not supported");
    }
  }
  need_switch(config, "parallel_residual", false, "parallel residuals are not supported");
  need_switch(config, "use_parallel_residual", false, "parallel residuals are not supported");
  need_absent(config, "clip_qkv", "clipped queries, keys and values are not supported");
  need_absent(config, "no_rope_layers", "layers without positions are not supported");
  need_absent(config, "attention_chunk_size", "attention within chunks is not supported");
  need_switch(config, "use_attention_sinks", false, "attention sinks are not supported");
  need_absent(config, "attention_sinks", "attention sinks are not supported");
  if (config.integer("num_sink_tokens", {.min = 0}).value_or(0) > 0) {
    config.refuse("num_sink_tokens", "is there: attention sinks are not supported");
  }
  for (const std::string_view factor :
       {"attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"}) {
    need_absent(config, factor, "factors of this kind are not supported");
  }
  need_absent(config, "attn_logit_softcapping", "capped scores are not supported");
  need_absent(config, "final_logit_softcapping", "capped logits are not supported");
}

// Null if config.json has none.
const nlohmann::json* layer_types(const JsonObject& config, const ModelShape& shape) {
  const nlohmann::json* types = config.find("layer_types");
  if (types == nullptr) {
    return nullptr;
  }
  if (!types->is_array() || std::ssize(*types) != shape.num_hidden_layers) {
    config.refuse("layer_types",
                  fmt::format("must be a list of {} names, one a layer", shape.num_hidden_layers));
  }
  for (const nlohmann::json& type : *types) {
    if (type != "sliding_attention" && type != "full_attention") {
      config.refuse("layer_types", "may hold \"full_attention\" and \"sliding_attention\", not " +
                                       described(type));
    }
  }
  return types;
}

}  // namespace

ModelShape llama_like_shape(const JsonObject& config, const LlamaLikeDefaults& defaults) {
  refuse_what_is_not_there(config);
  ModelShape shape{};
  shape.num_hidden_layers =
      size_field(config, "num_hidden_layers", defaults.num_hidden_layers, kMaxLayers);
  shape.hidden_size = size_field(config, "hidden_size", defaults.hidden_size, kMaxNormedRow);
  shape.ffn_dim = size_field(config, "intermediate_size", defaults.intermediate_size, kMaxFfn);
  shape.num_attention_heads =
      size_field(config, "num_attention_heads", defaults.num_attention_heads, kMaxWidth);
  // Null is not absent: it asks for a pair for each head, whatever the family's default.
  const bool grouped =
      defaults.num_key_value_heads > 0 && !config.json().contains("num_key_value_heads");
  shape.num_key_value_heads =
      size_field(config, "num_key_value_heads",
                 grouped ? defaults.num_key_value_heads : shape.num_attention_heads, kMaxWidth);
  if (shape.num_attention_heads % shape.num_key_value_heads != 0) {
    config.refuse("num_key_value_heads",
                  fmt::format("is {}, which does not divide {} (\"num_attention_heads\")",
                              shape.num_key_value_heads, shape.num_attention_heads));
  }
  const bool own_width =
      config.has("head_dim") || (defaults.head_dim > 0 && !config.json().contains("head_dim"));
  shape.head_dim = own_width
                       ? size_field(config, "head_dim", defaults.head_dim, kMaxWidth)
                       : divided_head_dim(config, shape, "hidden_size", "num_attention_heads");
  if (std::int64_t{shape.num_attention_heads} * shape.head_dim > kMaxFfn) {
    config.refuse("head_dim", fmt::format("is {} for {} heads; they are at most {} wide together",
                                          shape.head_dim, shape.num_attention_heads, kMaxFfn));
  }
  shape.vocab_size = size_field(config, "vocab_size", defaults.vocab_size, kMaxVocabulary);
  shape.max_position_embeddings = size_field(config, "max_position_embeddings",
                                             defaults.max_position_embeddings, kMaxPositions);
  shape.word_embed_proj_dim = shape.hidden_size;
  shape.activation_function = activation_field(config, "hidden_act", "silu");
  shape.norm_epsilon = epsilon_field(config, "rms_norm_eps", 1e-6);
  shape.norm = Norm::rms;
  shape.gated_mlp = shape.do_layer_norm_before = 1;
  shape.layer_norm_elementwise_affine = shape.has_final_layer_norm = 1;
  shape.tie_word_embeddings = switch_field(config, "tie_word_embeddings", false);
  read_rotary(config, shape);
  return shape;
}

void need_full_attention(const JsonObject& config, const ModelShape& shape) {
  const nlohmann::json* types = layer_types(config, shape);
  if (types != nullptr && std::ranges::find(*types, "sliding_attention") != types->end()) {
    config.refuse("layer_types", "asks for windows on some layers, which are not this family's");
  }
}

void read_layer_windows(const JsonObject& config, ModelShape& shape) {
  const bool used = switch_field(config, "use_sliding_window", false) != 0;
  const std::int32_t from = static_cast<std::int32_t>(
      config.integer("max_window_layers", {.min = 0, .max = kMaxLayers}).value_or(28));
  const bool null_window =
      config.json().contains("sliding_window") && !config.has("sliding_window");
  const nlohmann::json* types = layer_types(config, shape);
  for (std::int32_t layer = 0; layer < shape.num_hidden_layers; ++layer) {
    bool windowed = used && !null_window && layer >= from;
    if (types != nullptr) {
      windowed =
          (*types)[static_cast<std::size_t>(layer)] == "sliding_attention" && used && !null_window;
    }
    if (windowed) {
      shape.sliding_window = size_field(config, "sliding_window", 4096, kMaxPositions);
      shape.set_window({static_cast<std::uint32_t>(layer)});
    }
  }
}

}  // namespace poise
