#pragma once
// The tensors of a checkpoint and where each goes in the weight segment, as the family's description
// names them (common/families/family.h). Pure functions.

#include <string>
#include <string_view>
#include <vector>

#include "common/families/family.h"
#include "common/weight_layout.h"
#include "loader/checkpoint.h"
#include "loader/sources/weight_source.h"

namespace poise {

// The prefix of this checkpoint's names; fails if none or more than one fits.
std::string tensor_prefix(const Family& family, const Checkpoint& checkpoint,
                          const std::string& what);

// Every tensor the model needs, in the order of the weight segment.
std::vector<WeightTensor> tensor_list(const Family& family, const WeightLayout& layout,
                                      std::string_view prefix);

// Whether it is a table that says which group each input is of (act-order).
bool is_groups(Weight weight);

// Behind the prefix.
std::string_view embedding_name(const Family& family);

}  // namespace poise
