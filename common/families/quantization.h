#pragma once
// How a user wants a model's weights kept (`--quantization`, `--pack-weights`), and what that makes of a
// shape. Pure.

#include <cstdint>
#include <optional>
#include <string_view>

#include "common/dtype.h"
#include "common/model_shape.h"

namespace poise {

enum class Quantization : std::uint8_t { automatic, none, int8, int4 };

inline constexpr std::int32_t kRoundedGroup = 128;  // inputs that share a scale

std::optional<Quantization> quantization_from(std::string_view name);
std::string_view name_of(Quantization quantization);  // "auto", "none", "int8", "int4"

// Whether plain weights become codes as they are loaded.
constexpr bool rounds(Quantization asked) {
  return asked == Quantization::int8 || asked == Quantization::int4;
}
// What `--pack-weights` says: whether bfloat16 weights are packed without loss.
enum class PackWeights : std::uint8_t { off, automatic };
std::optional<PackWeights> pack_weights_from(std::string_view name);  // "off", "auto"

// The shape of a plain model under what was asked for: `int8` and `int4` pack the layers' matrices
// whose rows fill whole panels, in groups of 128 inputs without zero points, scales in `dtype`.
// Embeddings, head, norms and biases stay plain. `pack` packs the same matrices as bfloat12 if they stay
// bfloat16 otherwise.
ModelShape quantized(const ModelShape& plain, Quantization asked, PackWeights pack, DType dtype);

// The same model with nothing packed.
ModelShape unpacked(ModelShape shape);

}  // namespace poise
