// OPT. Published under three prefixes: by OPTForCausalLM, by OPTModel (and the first files), by
// OPTDecoder.

#include <array>

#include "common/families/config_fields.h"
#include "common/families/family.h"

namespace poise {
namespace {

ModelShape opt_shape(const JsonObject& config) {
  ModelShape shape{};
  shape.num_hidden_layers = size_field(config, "num_hidden_layers", 12, kMaxLayers);
  shape.hidden_size = size_field(config, "hidden_size", 768, kMaxNormedRow);
  shape.ffn_dim = size_field(config, "ffn_dim", 3072, kMaxFfn);
  shape.num_attention_heads = size_field(config, "num_attention_heads", 12, kMaxWidth);
  shape.num_key_value_heads = shape.num_attention_heads;
  shape.head_dim = divided_head_dim(config, shape, "hidden_size", "num_attention_heads");
  shape.vocab_size = size_field(config, "vocab_size", 50272, kMaxVocabulary);
  shape.max_position_embeddings =
      size_field(config, "max_position_embeddings", 2048, kMaxPositions);
  shape.position_offset = 2;
  shape.word_embed_proj_dim =
      size_field(config, "word_embed_proj_dim", shape.hidden_size, kMaxWidth);
  shape.activation_function = activation_field(config, "activation_function", "relu");
  shape.norm_epsilon = 1e-5F;
  shape.do_layer_norm_before = switch_field(config, "do_layer_norm_before", true);
  shape.qkv_bias = switch_field(config, "enable_bias", true);
  shape.output_bias = shape.mlp_bias = shape.qkv_bias;
  shape.layer_norm_elementwise_affine = switch_field(config, "layer_norm_elementwise_affine", true);
  const std::uint32_t removed = switch_field(config, "_remove_final_layer_norm", false);
  shape.has_final_layer_norm = shape.do_layer_norm_before != 0 && removed == 0 ? 1 : 0;
  shape.tie_word_embeddings = switch_field(config, "tie_word_embeddings", true);
  shape.learned_positions = 1;
  return shape;
}

constexpr std::array<std::string_view, 3> kOptPrefixes{"model.decoder.", "decoder.", ""};

constexpr std::array<TensorName, 6> kOptOuter{{
    {Weight::token_embedding, "embed_tokens.weight"},
    {Weight::position_embedding, "embed_positions.weight"},
    {Weight::project_in, "project_in.weight"},
    {Weight::project_out, "project_out.weight"},
    {Weight::final_norm_weight, "final_layer_norm.weight"},
    {Weight::final_norm_bias, "final_layer_norm.bias"},
}};

constexpr std::array<TensorName, 16> kOptLayer{{
    {Weight::w_kv, "self_attn.k_proj.weight", RowsFilled::upper},
    {Weight::w_kv, "self_attn.v_proj.weight", RowsFilled::lower},
    {Weight::b_kv, "self_attn.k_proj.bias", RowsFilled::upper},
    {Weight::b_kv, "self_attn.v_proj.bias", RowsFilled::lower},
    {Weight::attention_norm_weight, "self_attn_layer_norm.weight"},
    {Weight::attention_norm_bias, "self_attn_layer_norm.bias"},
    {Weight::w_q, "self_attn.q_proj.weight"},
    {Weight::b_q, "self_attn.q_proj.bias"},
    {Weight::w_o, "self_attn.out_proj.weight"},
    {Weight::b_o, "self_attn.out_proj.bias"},
    {Weight::mlp_norm_weight,
     "final_layer_norm.weight"},  // of the layer; the last norm's name, too
    {Weight::mlp_norm_bias, "final_layer_norm.bias"},
    {Weight::fc1, "fc1.weight"},
    {Weight::fc1_bias, "fc1.bias"},
    {Weight::fc2, "fc2.weight"},
    {Weight::fc2_bias, "fc2.bias"},
}};

}  // namespace

extern const Family kOpt;
constinit const Family kOpt{.model_type = "opt",
                            .architecture = "OPTForCausalLM",
                            .headless = "OPTModel",
                            .bos = 2,
                            .eos = 2,
                            .shape = opt_shape,
                            .prefixes = kOptPrefixes,
                            .layers = "layers.",
                            .outer = kOptOuter,
                            .layer = kOptLayer};

}  // namespace poise
