// Llama 1, 2, 3 and what derives from them, under LlamaForCausalLM.

#include "common/families/config_fields.h"
#include "common/families/llama_like.h"

namespace poise {
namespace {

ModelShape llama_shape(const JsonObject& config) {
  ModelShape shape = llama_like_shape(config, {.vocab_size = 32000,
                                               .hidden_size = 4096,
                                               .intermediate_size = 11008,
                                               .num_hidden_layers = 32,
                                               .num_attention_heads = 32,
                                               .max_position_embeddings = 2048});
  need_full_attention(config, shape);
  shape.qkv_bias = shape.output_bias = switch_field(config, "attention_bias", false);
  shape.mlp_bias = switch_field(config, "mlp_bias", false);
  return shape;
}

}  // namespace

extern const Family kLlama;
constinit const Family kLlama{.model_type = "llama",
                              .architecture = "LlamaForCausalLM",
                              .headless = "LlamaModel",
                              .bos = 1,
                              .eos = 2,
                              .shape = llama_shape,
                              .prefixes = kLlamaLikePrefixes,
                              .layers = "layers.",
                              .outer = kLlamaLikeOuter,
                              .layer = kLlamaLikeLayer};

}  // namespace poise
