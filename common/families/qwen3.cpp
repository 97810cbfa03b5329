// Qwen3: Llama's layout with norms of the heads of queries and keys, and windows by layer.

#include "common/families/config_fields.h"
#include "common/families/llama_like.h"

namespace poise {
namespace {

ModelShape qwen3_shape(const JsonObject& config) {
  ModelShape shape = llama_like_shape(config, {.vocab_size = 151936,
                                               .hidden_size = 4096,
                                               .intermediate_size = 22016,
                                               .num_hidden_layers = 32,
                                               .num_attention_heads = 32,
                                               .num_key_value_heads = 32,
                                               .head_dim = 128,
                                               .max_position_embeddings = 32768});
  shape.qkv_bias = shape.output_bias = switch_field(config, "attention_bias", false);
  shape.qk_norm = 1;
  read_layer_windows(config, shape);
  return shape;
}

}  // namespace

extern const Family kQwen3;
constinit const Family kQwen3{.model_type = "qwen3",
                              .architecture = "Qwen3ForCausalLM",
                              .headless = "Qwen3Model",
                              .bos = -1,
                              .eos = -1,
                              .shape = qwen3_shape,
                              .prefixes = kLlamaLikePrefixes,
                              .layers = "layers.",
                              .outer = kLlamaLikeOuter,
                              .layer = kLlamaLikeLayer};

}  // namespace poise
