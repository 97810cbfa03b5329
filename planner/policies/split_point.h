#pragma once
// KVPR's split point (Eq. 11 and 12): of the s blocks of each of the b requests in a mini-batch, the first
// l cross the link as activations and are made into K and V while the other s - l cross it as K and V,
//   t(l) = T_load_act(b · l) + max(T_kv_gen(b · l), T_load_kv(b · (s - l))).
// A mini-batch's copies and products begin once for all of its requests, so that their constants must
// not be charged to each. Pure functions.

#include <cstdint>

#include "planner/costs/cost_model.h"

namespace poise {

struct SplitCosts {
  const Line& load_act;
  const Line& kv_gen;
  const Line& load_kv;
  double requests = 1;  // b
};

Seconds split_time(const SplitCosts& costs, std::int32_t l, std::int32_t blocks);
// The l, from 0 to `blocks`, for which t(l) is least; the smaller one of two. Tries every l: measured
// times rise in steps, and where straight lines cross says little of them.
std::int32_t split_point(const SplitCosts& costs, std::int32_t blocks);

}  // namespace poise
