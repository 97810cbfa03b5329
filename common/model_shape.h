#pragma once
// The shape of a decoder-only model: sizes, switches and what follows from them.
// `read_model_config` (common/model_config.h) fills it from config.json; the loader writes it to the
// control segment, where it is read-only from then on. Plain data of fixed size, because it lies in
// shared memory. Field names are config.json's.

#include <cstdint>
#include <type_traits>

#include "common/dtype.h"
#include "common/units.h"

namespace poise {

enum class Activation : std::uint32_t { relu = 0, gelu = 1, gelu_tanh = 2 };

struct ModelShape {
  std::int32_t num_hidden_layers;
  std::int32_t hidden_size;  // h: width of the residual stream and of an ACT row
  std::int32_t ffn_dim;
  std::int32_t num_attention_heads;
  std::int32_t num_key_value_heads;
  std::int32_t head_dim;
  std::int32_t vocab_size;  // rows of the token embedding and of the head
  std::int32_t max_position_embeddings;
  std::int32_t position_offset;  // OPT's position table starts with 2 rows that no token uses
  std::int32_t
      word_embed_proj_dim;  // width of the token embedding; projected in and out where it is not h
  Activation activation_function;
  float layer_norm_epsilon;
  std::uint32_t do_layer_norm_before;  // 0: post-norm, as OPT-350m
  std::uint32_t enable_bias;
  std::uint32_t layer_norm_elementwise_affine;
  std::uint32_t has_final_layer_norm;
  std::uint32_t tie_word_embeddings;

  std::int32_t kv_dim() const { return num_key_value_heads * head_dim; }
  std::int32_t q_dim() const { return num_attention_heads * head_dim; }
  bool projects_embeddings() const { return word_embed_proj_dim != hidden_size; }

  friend bool operator==(const ModelShape&, const ModelShape&) = default;
};
static_assert(std::is_trivially_copyable_v<ModelShape> && sizeof(ModelShape) == 17 * 4);

}  // namespace poise
