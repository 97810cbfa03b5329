// Mistral: Llama's layout, no biases, and a window on all layers unless it is null.

#include "common/families/config_fields.h"
#include "common/families/llama_like.h"

namespace poise {
namespace {

ModelShape mistral_shape(const JsonObject& config) {
  need_absent(config, "layer_types", "windows on some layers alone are not this family's");
  ModelShape shape = llama_like_shape(config, {.vocab_size = 32000,
                                               .hidden_size = 4096,
                                               .intermediate_size = 14336,
                                               .num_hidden_layers = 32,
                                               .num_attention_heads = 32,
                                               .num_key_value_heads = 8,
                                               .max_position_embeddings = 4096 * 32});
  if (config.has("sliding_window") || !config.json().contains("sliding_window")) {
    shape.sliding_window = size_field(config, "sliding_window", 4096, kMaxPositions);
    for (std::int32_t layer = 0; layer < shape.num_hidden_layers; ++layer) {
      shape.set_window({static_cast<std::uint32_t>(layer)});
    }
  }
  return shape;
}

}  // namespace

extern const Family kMistral;
constinit const Family kMistral{.model_type = "mistral",
                                .architecture = "MistralForCausalLM",
                                .headless = "MistralModel",
                                .bos = 1,
                                .eos = 2,
                                .shape = mistral_shape,
                                .prefixes = kLlamaLikePrefixes,
                                .layers = "layers.",
                                .outer = kLlamaLikeOuter,
                                .layer = kLlamaLikeLayer};

}  // namespace poise
