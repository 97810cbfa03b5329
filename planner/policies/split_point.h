#pragma once
// KVPR's split point (Eq. 11 and 12): of a request's s blocks, the first l cross the link as
// activations and are regenerated while the other s - l cross it as K and V,
//   t(l) = T_load_act(l) + max(T_kv_gen(l), T_load_kv(s - l)).
// Pure functions.

#include <cstdint>

#include "planner/costs/cost_model.h"

namespace poise {

Seconds split_time(const Line& load_act, const Line& kv_gen, const Line& load_kv, std::int32_t l,
                   std::int32_t blocks);
// The l from 0 to `blocks` with the least t(l); the smallest of equals.
std::int32_t split_point(const Line& load_act, const Line& kv_gen, const Line& load_kv,
                         std::int32_t blocks);

}  // namespace poise
