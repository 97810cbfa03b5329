#pragma once
// Whether attention may read a model's activations as they are ("absorption", kernels/kernels.h: AbsorbedAttention).
// A key must be a linear map of the attention input: not rotated, not normed and not rounded to codes.

#include <optional>
#include <string>

#include "common/formats/kv_format.h"
#include "common/model_shape.h"

namespace poise {

// Why not, as the end of a sentence ("its keys are rotated by their position"); nothing where it may.
std::optional<std::string> why_not_absorbed(const ModelShape& shape, KvFormat kv_format);

}  // namespace poise
