// Qwen2 and Qwen2.5: Llama's layout with biases on queries, keys and values alone, and windows by layer.

#include "common/families/config_fields.h"
#include "common/families/llama_like.h"

namespace poise {
namespace {

ModelShape qwen2_shape(const JsonObject& config) {
  ModelShape shape = llama_like_shape(config, {.vocab_size = 151936,
                                               .hidden_size = 4096,
                                               .intermediate_size = 22016,
                                               .num_hidden_layers = 32,
                                               .num_attention_heads = 32,
                                               .num_key_value_heads = 32,
                                               .max_position_embeddings = 32768});
  shape.qkv_bias = 1;
  read_layer_windows(config, shape);
  return shape;
}

}  // namespace

extern const Family kQwen2;
constinit const Family kQwen2{.model_type = "qwen2",
                              .architecture = "Qwen2ForCausalLM",
                              .headless = "Qwen2Model",
                              .bos = -1,
                              .eos = -1,
                              .shape = qwen2_shape,
                              .prefixes = kLlamaLikePrefixes,
                              .layers = "layers.",
                              .outer = kLlamaLikeOuter,
                              .layer = kLlamaLikeLayer};

}  // namespace poise
