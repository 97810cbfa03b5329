#include "common/families/absorption.h"

#include <algorithm>

#include "common/weight_layout.h"

namespace poise {

std::optional<std::string> why_not_absorbed(const ModelShape& shape, KvFormat kv_format) {
  if (shape.rotates()) {
    return "its keys are rotated by their position";
  }
  if (shape.qk_norm != 0) {
    return "its keys are normed";
  }
  if (std::ranges::any_of(shape.window_layers, [](std::uint32_t layers) { return layers != 0; })) {
    return "layers of it have a sliding window";
  }
  if ((shape.packed_weights >> static_cast<unsigned>(Weight::w_kv) & 1U) != 0) {
    return "its W_K and W_V are packed";
  }
  if (kv_format != KvFormat::plain) {
    return "its keys and values are kept as codes (--kv-cache-dtype)";
  }
  return std::nullopt;
}

}  // namespace poise
