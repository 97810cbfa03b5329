#pragma once
// The names of OPT's tensors in HuggingFace checkpoints, and where each goes. The prefix before
// "embed_tokens.weight" differs by the class that saved the model: "model.decoder." (OPTForCausalLM),
// "decoder." (OPTModel, and the first files that were published), none (OPTDecoder). Pure functions.

#include <string>
#include <string_view>
#include <vector>

#include "common/weight_layout.h"
#include "loader/checkpoint.h"
#include "loader/weight_source.h"

namespace poise {

inline constexpr std::string_view kHeadName = "lm_head.weight";

// The prefix of this checkpoint's names; fails if none or more than one fits.
std::string opt_prefix(const Checkpoint& checkpoint, const std::string& what);

// Every tensor the model needs, in the order of the weight segment.
std::vector<WeightTensor> opt_tensors(const WeightLayout& layout, std::string_view prefix);

}  // namespace poise
