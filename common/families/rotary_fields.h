#pragma once
// A config's rotary positions: "rope_scaling" (with "type" or "rope_type") and "rope_theta" as before
// version 5 of transformers, or "rope_parameters" with all of them inside. Where both are there,
// "rope_scaling" wins, as it does there. Pure.

#include "common/files/json_file.h"
#include "common/model_shape.h"

namespace poise {

// Fills shape.rotary for a model that rotates whole heads, and for `dynamic` extends
// max_position_embeddings by the factor. Reads head_dim and max_position_embeddings of the shape. Fails for kinds that
// are not there, naming those that are.
void read_rotary(const JsonObject& config, ModelShape& shape);

}  // namespace poise
