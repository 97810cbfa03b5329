#pragma once
// The policy of a run, or of a plan, whose user named none. Pure.

#include <optional>
#include <string>

#include "planner/costs/costs.h"
#include "planner/policies/policy.h"

namespace poise {

// What is best by the costs; `hybrid` where a share says it all. A device that is the host (the CPU
// device) hides the making of keys and values behind nothing: there they are kept, unless somebody's
// costs were given to decide by.
std::string policy_or_default(const std::optional<std::string>& named, bool device_is_host,
                              const CostOptions& costs, const PolicyOptions& options);

}  // namespace poise
