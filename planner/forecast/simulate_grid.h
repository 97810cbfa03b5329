#pragma once
// Every policy on a grid of models (with a key for each query, and with shared ones), machines,
// memories and lengths, with planner/forecast/simulate.h.

#include <optional>
#include <string>

#include "common/files/json.h"

namespace poise {

// {"rows": [{"model", "machine", "gpu_gib", "host_gib", "requests", "prompt", "answer", each policy:
// tokens/s, all with as many requests at a time, "room_for_all": with optimal, "best": of the others,
// "optimal_to_best": ratio, "at_a_time": where optimal chooses that, too, "optimal_so": its tokens/s
// then}, …], "notes": [the least ratio, what the choice gains]}; a policy that memory does not
// suffice for has null. `machine`: on this one alone (costs/machine_file.h), with all of its memory.
// The same with host cores of several speeds, on fewer models and works: "host_gbps", "on_host" (the share of requests
// that optimal gives them).
nlohmann::ordered_json host_grid(const std::optional<std::string>& machine);
nlohmann::ordered_json policy_grid(const std::optional<std::string>& machine);

}  // namespace poise
