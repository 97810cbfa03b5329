#include "common/families/quantization.h"

#include <algorithm>
#include <array>

#include "common/weight_layout.h"

namespace poise {
namespace {

constexpr std::array<std::string_view, 4> kNames{"auto", "none", "int8", "int4"};

}  // namespace

std::optional<Quantization> quantization_from(std::string_view name) {
  const auto found = std::ranges::find(kNames, name);
  return found == kNames.end() ? std::nullopt
                               : std::optional(static_cast<Quantization>(found - kNames.begin()));
}

std::string_view name_of(Quantization quantization) {
  return kNames[static_cast<std::size_t>(quantization)];
}

std::optional<PackWeights> pack_weights_from(std::string_view name) {
  return name == "off"    ? std::optional(PackWeights::off)
         : name == "auto" ? std::optional(PackWeights::automatic)
                          : std::nullopt;
}

ModelShape quantized(const ModelShape& plain, Quantization asked, PackWeights pack, DType dtype) {
  ModelShape shape = plain;
  const std::uint32_t packable = packable_weights(plain);
  if (rounds(asked) && packable != 0) {
    shape.packed = {.codes = asked == Quantization::int8 ? Codes::int8 : Codes::int4,
                    .scale_dtype = dtype,
                    .group = kRoundedGroup};
    shape.packed_weights = packable;
  } else if (pack == PackWeights::automatic && dtype == DType::bfloat16 && packable != 0) {
    shape.packed = kBfloat12;
    shape.packed_weights = packable;
  }
  return shape;
}

ModelShape unpacked(ModelShape shape) {
  shape.packed = {};
  shape.packed_weights = 0;
  return shape;
}

}  // namespace poise
