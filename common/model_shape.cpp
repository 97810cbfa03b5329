#include "common/model_shape.h"

#include <algorithm>
#include <array>

#include "common/families/config_fields.h"
#include "common/kernel_limits.h"
#include "common/weight_layout.h"

namespace poise {
namespace {

bool is_within(std::int64_t size, std::int64_t largest) { return size > 0 && size <= largest; }

bool is_switch(std::uint32_t value) { return value <= 1; }

// Without `default`, so that the compiler names this place for a new kind.
bool is_known(RotaryKind kind) {
  switch (kind) {
    case RotaryKind::none:
    case RotaryKind::plain:
    case RotaryKind::linear:
    case RotaryKind::dynamic:
    case RotaryKind::yarn:
    case RotaryKind::longrope:
    case RotaryKind::llama3:
      return true;
  }
  return false;
}

}  // namespace

std::string_view name_of(Codes codes) {
  static constexpr std::array<std::string_view, 5> kNames{"none", "int4", "int8", "float8",
                                                          "bfloat12"};
  return kNames[static_cast<std::size_t>(codes)];
}

bool PackedFormat::is_sound() const {
  if (!is_packed()) {
    return *this == PackedFormat{};
  }
  if (codes == Codes::bfloat12) {
    return *this == kBfloat12;
  }
  const bool grouped = group == 0 || (group >= kMinPackedGroup && group <= kMaxPackedGroup);
  const bool integers = codes != Codes::float8;
  return codes <= Codes::float8 && scale_dtype <= DType::bfloat16 && grouped &&
         zero_points <= (integers ? 1U : 0U) && input_groups <= (integers && group > 0 ? 1U : 0U);
}

bool ModelShape::is_sound() const {
  return is_within(num_hidden_layers, kMaxModelLayers) && is_within(hidden_size, kMaxNormedRow) &&
         is_within(ffn_dim, kMaxFfn) && is_within(num_attention_heads, kMaxWidth) &&
         is_within(num_key_value_heads, num_attention_heads) &&
         num_attention_heads % num_key_value_heads == 0 && is_within(head_dim, kMaxHeadDim) &&
         is_within(std::int64_t{num_attention_heads} * head_dim, kMaxFfn) &&
         is_within(vocab_size, kMaxVocabulary) &&
         is_within(max_position_embeddings, kMaxPositions) &&
         is_within(position_offset + std::int64_t{1}, kMaxWidth) &&
         is_within(word_embed_proj_dim, kMaxWidth) && activation_function <= Activation::silu &&
         norm <= Norm::rms && sliding_window >= 0 && is_known(rotary.kind) && rotary.dim >= 0 &&
         rotary.dim <= std::min(head_dim, 2 * kMaxRotaryPairs) && packed.is_sound() &&
         packed.is_packed() == (packed_weights != 0) &&
         (packed_weights & ~packable_weights(*this)) == 0 &&
         std::ranges::all_of(std::array{do_layer_norm_before, qkv_bias, output_bias, mlp_bias,
                                        layer_norm_elementwise_affine, has_final_layer_norm,
                                        tie_word_embeddings, learned_positions, qk_norm, gated_mlp},
                             is_switch);
}

}  // namespace poise
