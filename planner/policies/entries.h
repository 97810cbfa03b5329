#pragma once
// One function for each policy's file, for the registry.

#include "planner/policies/policy.h"

namespace poise {

PolicyEntry kv_only_entry();
PolicyEntry act_only_entry();
PolicyEntry hybrid_entry();
PolicyEntry hybrid_static_entry();
PolicyEntry kvpr_entry();
PolicyEntry row_by_row_entry();
PolicyEntry token_recompute_entry();
PolicyEntry optimal_entry();
PolicyEntry host_kv_entry();
PolicyEntry three_way_entry();

// Fails if --act-share was given to a policy that takes none.
void refuse_act_share(std::string_view policy, const PolicyOptions& options);

// The share of --act-share; fails if it is invalid.
std::optional<double> checked_act_share(const PolicyOptions& options);

}  // namespace poise
