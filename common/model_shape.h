#pragma once
// The shape of a decoder-only model: sizes, switches and what follows from them.
// `read_model_config` (common/model_config.h) fills it from config.json; the loader writes it to the
// control segment, where it is read-only from then on. Plain data of fixed size, because it lies in
// shared memory. Field names are config.json's where families agree on one. The executor and the
// planner read these switches; they never ask which family a model is of.

#include <cstdint>
#include <type_traits>

#include "common/dtype.h"
#include "common/formats/packed_weights.h"
#include "common/units.h"

namespace poise {

enum class Activation : std::uint32_t { relu = 0, gelu = 1, gelu_tanh = 2, silu = 3 };
enum class Norm : std::uint32_t { layer_norm = 0, rms = 1 };

// How a rotary model's frequencies follow from its config (common/families/rotary.h).
enum class RotaryKind : std::uint32_t {
  none = 0,
  plain = 1,  // "default"
  linear = 2,
  dynamic = 3,
  yarn = 4,
  longrope = 5,
  llama3 = 6
};

inline constexpr std::int32_t kMaxRotaryPairs = 128;
inline constexpr std::int32_t kMaxModelLayers = 1024;

struct RotaryShape {
  RotaryKind kind = RotaryKind::none;
  std::int32_t dim = 0;  // of each head, from its first number on, is rotated; even
  float theta = 0;       // "rope_theta"
  float factor = 1;
  // Positions of the training. Kinds whose frequencies depend on a length use their first table up to it.
  std::int32_t original_max_position_embeddings = 0;
  float scale = 1;                                  // of cosines and sines: the attention factor
  float low_freq_factor = 0, high_freq_factor = 0;  // llama3
  float beta_fast = 0, beta_slow = 0;               // yarn
  std::uint32_t truncate = 0;                       // yarn: its range is made whole numbers
  float short_factor[kMaxRotaryPairs] = {};         // longrope, (dim / 2)
  float long_factor[kMaxRotaryPairs] = {};

  friend bool operator==(const RotaryShape&, const RotaryShape&) = default;
};

struct ModelShape {
  std::int32_t num_hidden_layers;
  std::int32_t hidden_size;  // h: width of the residual stream and of an ACT row
  std::int32_t ffn_dim;      // width between the MLP's two products
  std::int32_t num_attention_heads;
  std::int32_t num_key_value_heads;
  std::int32_t head_dim;
  std::int32_t vocab_size;               // rows of the token embedding and of the head
  std::int32_t max_position_embeddings;  // `dynamic` rotary positions: what scaling makes of them
  std::int32_t position_offset;  // OPT's position table starts with 2 rows that no token uses
  std::int32_t
      word_embed_proj_dim;  // width of the token embedding; projected in and out where it is not h
  Activation activation_function;
  float norm_epsilon;
  std::uint32_t do_layer_norm_before;  // 0: post-norm, as OPT-350m
  std::uint32_t qkv_bias;
  std::uint32_t output_bias;  // of W_O
  std::uint32_t mlp_bias;
  std::uint32_t layer_norm_elementwise_affine;
  std::uint32_t has_final_layer_norm;
  std::uint32_t tie_word_embeddings;
  std::uint32_t learned_positions;  // a table of positions is added to the embeddings
  Norm norm = Norm::layer_norm;     // rms: no biases
  std::uint32_t qk_norm = 0;        // RMSNorm over each head of q and k, before rotation
  std::uint32_t gated_mlp = 0;      // activation(gate) · up between the products
  std::int32_t sliding_window = 0;  // of the layers below; 0: no layer has one
  std::uint32_t window_layers[kMaxModelLayers / 32] = {};  // bit l: layer l has the window
  RotaryShape rotary;
  // How the matrices of the layers are kept; those whose bit is not set stay plain.
  PackedFormat packed;
  std::uint32_t packed_weights = 0;  // bit w: of Weight w (common/weight_layout.h)

  std::int32_t kv_dim() const { return num_key_value_heads * head_dim; }
  std::int32_t q_dim() const { return num_attention_heads * head_dim; }
  // Outputs of the MLP's first product: W_gate above W_up in gated models.
  std::int32_t fc1_dim() const { return gated_mlp != 0 ? 2 * ffn_dim : ffn_dim; }
  bool projects_embeddings() const { return word_embed_proj_dim != hidden_size; }
  bool rotates() const { return rotary.kind != RotaryKind::none; }
  // Whether queries and keys need a pass of their own behind their products (kernels.h, Rotate).
  bool turns_heads() const { return rotates() || qk_norm != 0; }
  // How many positions a layer's rows attend at most; 0: all.
  std::int32_t window(LayerId layer) const {
    return (window_layers[layer.n / 32] >> (layer.n % 32) & 1U) != 0 ? sliding_window : 0;
  }
  void set_window(LayerId layer) { window_layers[layer.n / 32] |= 1U << (layer.n % 32); }

  // Whether read_model_config could have made it: sizes within their bounds, which agree.
  bool is_sound() const;

  friend bool operator==(const ModelShape&, const ModelShape&) = default;
};
static_assert(std::is_trivially_copyable_v<ModelShape> &&
              sizeof(RotaryShape) == (11 + 2 * kMaxRotaryPairs) * 4 &&
              sizeof(ModelShape) ==
                  (25 + kMaxModelLayers / 32) * 4 + sizeof(RotaryShape) + sizeof(PackedFormat));

}  // namespace poise
