#include <algorithm>
#include <array>

#include "common/trouble.h"
#include "planner/policies/entries.h"

namespace poise {

std::span<const PolicyEntry> policies() {
  static const std::array<PolicyEntry, 10> entries{
      optimal_entry(), hybrid_entry(),   hybrid_static_entry(),   act_only_entry(),
      kv_only_entry(), kvpr_entry(),     token_recompute_entry(), row_by_row_entry(),
      host_kv_entry(), three_way_entry()};
  return entries;
}

const PolicyEntry& policy_named(std::string_view name) {
  const auto all = policies();
  const auto found = std::ranges::find(all, name, &PolicyEntry::name);
  if (found == all.end()) {
    std::string names;
    for (const PolicyEntry& entry : all) {
      names += names.empty() ? "" : ", ";
      names += entry.name;
    }
    fail("--policy {}: there is no such policy; there are {}", name, names);
  }
  return *found;
}

std::unique_ptr<Policy> make_policy(std::string_view name, const PolicyOptions& options) {
  const PolicyEntry& policy = policy_named(name);
  if (options.recompute_share && name != "token-recompute") {
    fail("--recompute-share {}: the policy {} recomputes no tokens; use --policy token-recompute",
         *options.recompute_share, name);
  }
  if (options.row_by_row && name != "kvpr" && name != "row-by-row") {
    fail(
        "--schedule row-by-row: the policy {} has no such schedule; use --policy kvpr, or --policy "
        "row-by-row, which keeps keys and values alone",
        name);
  }
  return policy.make(options);
}

void refuse_act_share(std::string_view policy, const PolicyOptions& options) {
  if (options.act_share) {
    fail("--act-share {}: the policy {} takes no share; use --policy hybrid or kvpr",
         *options.act_share, policy);
  }
}

std::optional<double> checked_act_share(const PolicyOptions& options) {
  if (options.act_share && !(*options.act_share >= 0 && *options.act_share <= 1)) {
    fail("--act-share {}: the share of ACT blocks lies between 0 and 1", *options.act_share);
  }
  return options.act_share;
}

}  // namespace poise
