#pragma once
// The shape of a model so small that tests count its weights and pieces.

#include "common/model_shape.h"

namespace poise::testing_support {

inline ModelShape small_shape(std::int32_t layers) {
  ModelShape shape{};
  shape.num_hidden_layers = layers;
  shape.hidden_size = 64;
  shape.ffn_dim = 256;
  shape.num_attention_heads = shape.num_key_value_heads = 4;
  shape.head_dim = 16;
  shape.vocab_size = 100;
  shape.max_position_embeddings = 128;
  shape.word_embed_proj_dim = 64;
  shape.qkv_bias = shape.output_bias = shape.mlp_bias = shape.learned_positions =
      shape.layer_norm_elementwise_affine = 1;
  return shape;
}

}  // namespace poise::testing_support
