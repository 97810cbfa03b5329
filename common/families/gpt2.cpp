// GPT-2. Its matrices are Conv1D's, (in, out), and one of them holds queries, keys and values.

#include <array>

#include "common/families/config_fields.h"
#include "common/families/family.h"

namespace poise {
namespace {

ModelShape gpt2_shape(const JsonObject& config) {
  need_switch(config, "scale_attn_weights", true, "scores without a scale are not supported");
  need_switch(config, "scale_attn_by_inverse_layer_idx", false,
              "scores scaled by the layer's number are not supported");
  need_switch(config, "add_cross_attention", false, "an encoder beside it is not supported");
  ModelShape shape{};
  shape.num_hidden_layers = size_field(config, "n_layer", 12, kMaxLayers);
  shape.hidden_size = size_field(config, "n_embd", 768, kMaxNormedRow);
  shape.ffn_dim = size_field(config, "n_inner", std::int64_t{4} * shape.hidden_size, kMaxFfn);
  shape.num_attention_heads = size_field(config, "n_head", 12, kMaxWidth);
  shape.num_key_value_heads = shape.num_attention_heads;
  shape.head_dim = divided_head_dim(config, shape, "n_embd", "n_head");
  shape.vocab_size = size_field(config, "vocab_size", 50257, kMaxVocabulary);
  shape.max_position_embeddings = size_field(config, "n_positions", 1024, kMaxPositions);
  shape.word_embed_proj_dim = shape.hidden_size;
  shape.activation_function = activation_field(config, "activation_function", "gelu_new");
  shape.norm_epsilon = epsilon_field(config, "layer_norm_epsilon", 1e-5);
  shape.do_layer_norm_before = shape.layer_norm_elementwise_affine = 1;
  shape.qkv_bias = shape.output_bias = shape.mlp_bias = 1;
  shape.has_final_layer_norm = shape.learned_positions = 1;
  shape.tie_word_embeddings = switch_field(config, "tie_word_embeddings", true);
  return shape;
}

constexpr std::array<std::string_view, 2> kGpt2Prefixes{"transformer.", ""};

constexpr std::array<TensorName, 4> kGpt2Outer{{
    {Weight::token_embedding, "wte.weight"},
    {Weight::position_embedding, "wpe.weight"},
    {Weight::final_norm_weight, "ln_f.weight"},
    {Weight::final_norm_bias, "ln_f.bias"},
}};

constexpr std::array<TensorName, 14> kGpt2Layer{{
    {Weight::w_kv, "attn.c_attn.weight", RowsFilled::all, OutputsTaken::keys_values},
    {Weight::b_kv, "attn.c_attn.bias", RowsFilled::all, OutputsTaken::keys_values},
    {Weight::attention_norm_weight, "ln_1.weight"},
    {Weight::attention_norm_bias, "ln_1.bias"},
    {Weight::w_q, "attn.c_attn.weight", RowsFilled::all, OutputsTaken::queries},
    {Weight::b_q, "attn.c_attn.bias", RowsFilled::all, OutputsTaken::queries},
    {Weight::w_o, "attn.c_proj.weight"},
    {Weight::b_o, "attn.c_proj.bias"},
    {Weight::mlp_norm_weight, "ln_2.weight"},
    {Weight::mlp_norm_bias, "ln_2.bias"},
    {Weight::fc1, "mlp.c_fc.weight"},
    {Weight::fc1_bias, "mlp.c_fc.bias"},
    {Weight::fc2, "mlp.c_proj.weight"},
    {Weight::fc2_bias, "mlp.c_proj.bias"},
}};

}  // namespace

extern const Family kGpt2;
constinit const Family kGpt2{.model_type = "gpt2",
                             .architecture = "GPT2LMHeadModel",
                             .headless = "GPT2Model",
                             .bos = 50256,
                             .eos = 50256,
                             .shape = gpt2_shape,
                             .prefixes = kGpt2Prefixes,
                             .layers = "h.",
                             .outer = kGpt2Outer,
                             .layer = kGpt2Layer,
                             .inputs_first = true};

}  // namespace poise
