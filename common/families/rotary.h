#pragma once
// The frequencies of rotary positions: how fast each pair of numbers of a head turns from one position
// to the next, as transformers' modeling_rope_utils.py computes them (5.24), in float32 where it does.
// Two kinds have several sets of them. `dynamic` has one for each length beyond the training's,
// `longrope` one up to that length and one beyond. The length of a row is that of the prompt it stands
// in, or its own position + 1 if it stands behind the prompt; so it depends on neither how a prompt is
// cut nor whether a key is made again. Pure functions.

#include <cstdint>
#include <vector>

#include "common/model_shape.h"
#include "common/units.h"

namespace poise {

inline std::int32_t rotary_pairs(const ModelShape& shape) { return shape.rotary.dim / 2; }
std::int32_t frequency_sets(const ModelShape& shape);  // 0: the model does not rotate

// (frequency_sets, rotary_pairs)
std::vector<float> rotary_frequencies(const ModelShape& shape);

// Which set turns the row at `position` of a request whose prompt has `prompt_tokens`.
std::int32_t frequency_set(const ModelShape& shape, std::int32_t position,
                           std::int32_t prompt_tokens);
// Whether that depends on the prompt at all.
bool depends_on_prompt(const ModelShape& shape);

}  // namespace poise
