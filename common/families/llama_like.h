#pragma once
// What Llama and the families that took over its layout share: RMSNorm, rotary positions, grouped
// queries, a gated MLP, and the names of their tensors. Pure functions and constants.

#include <array>
#include <string_view>

#include "common/families/family.h"

namespace poise {

// What config.json leaves out, by family.
struct LlamaLikeDefaults {
  std::int64_t vocab_size, hidden_size, intermediate_size, num_hidden_layers, num_attention_heads;
  std::int64_t num_key_value_heads;  // 0: as many as attention heads
  std::int64_t head_dim;             // 0: hidden_size / num_attention_heads
  std::int64_t max_position_embeddings;
};

// All but biases, norms of heads and windows, which families differ in.
ModelShape llama_like_shape(const JsonObject& config, const LlamaLikeDefaults& defaults);
// Fails if "layer_types" asks for anything else.
void need_full_attention(const JsonObject& config, const ModelShape& shape);
// Qwen's window: of the layers that "layer_types" names, or, with "use_sliding_window", of those from
// "max_window_layers" on.
void read_layer_windows(const JsonObject& config, ModelShape& shape);

inline constexpr std::array<std::string_view, 2> kLlamaLikePrefixes{"model.", ""};

inline constexpr std::array<TensorName, 2> kLlamaLikeOuter{{
    {Weight::token_embedding, "embed_tokens.weight"},
    {Weight::final_norm_weight, "norm.weight"},
}};

// A tensor whose weight the shape does not have (a bias, a norm of heads) is not looked for.
inline constexpr std::array<TensorName, 18> kLlamaLikeLayer{{
    {Weight::w_kv, "self_attn.k_proj.weight", RowsFilled::upper},
    {Weight::w_kv, "self_attn.v_proj.weight", RowsFilled::lower},
    {Weight::b_kv, "self_attn.k_proj.bias", RowsFilled::upper},
    {Weight::b_kv, "self_attn.v_proj.bias", RowsFilled::lower},
    {Weight::attention_norm_weight, "input_layernorm.weight"},
    {Weight::k_norm, "self_attn.k_norm.weight"},
    {Weight::w_q, "self_attn.q_proj.weight"},
    {Weight::b_q, "self_attn.q_proj.bias"},
    {Weight::q_norm, "self_attn.q_norm.weight"},
    {Weight::w_o, "self_attn.o_proj.weight"},
    {Weight::b_o, "self_attn.o_proj.bias"},
    {Weight::mlp_norm_weight, "post_attention_layernorm.weight"},
    {Weight::fc1, "mlp.gate_proj.weight", RowsFilled::upper},
    {Weight::fc1, "mlp.up_proj.weight", RowsFilled::lower},
    {Weight::fc1_bias, "mlp.gate_proj.bias", RowsFilled::upper},
    {Weight::fc1_bias, "mlp.up_proj.bias", RowsFilled::lower},
    {Weight::fc2, "mlp.down_proj.weight"},
    {Weight::fc2_bias, "mlp.down_proj.bias"},
}};

}  // namespace poise
