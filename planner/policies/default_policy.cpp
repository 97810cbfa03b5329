#include "planner/policies/default_policy.h"

namespace poise {

std::string policy_or_default(const std::optional<std::string>& named, bool device_is_host,
                              const CostOptions& costs, const PolicyOptions& options) {
  if (named || options.act_share || options.recompute_share) {
    return named.value_or("hybrid");
  }
  return device_is_host && !costs.machine && !costs.profile ? "kv-only" : "optimal";
}

}  // namespace poise
