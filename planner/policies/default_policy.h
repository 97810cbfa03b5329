#pragma once
// The policy of a run, or of a plan, whose user named none. Pure.

#include <optional>
#include <string>

#include "planner/costs/costs.h"
#include "planner/policies/policy.h"

namespace poise {

// `optimal`, which decides by the costs; `hybrid` if the user gave a share. If the device is the host
// (the CPU device), regenerating keys and values saves no transfer: they are kept, unless the user named
// costs to decide by.
std::string policy_or_default(const std::optional<std::string>& named, bool device_is_host,
                              const CostOptions& costs, const PolicyOptions& options);

}  // namespace poise
