#pragma once
// Every policy on a grid of models (with a key for each query, and with shared ones), machines,
// memories and lengths, played by planner/simulate.h.

#include <cstddef>
#include <nlohmann/json.hpp>

namespace poise {

// {"rows": [{"model", "machine", "gpu_gib", "host_gib", "requests", "prompt", "answer", each policy:
// tokens/s, "room_for_all": at a time with optimal, "best": of the others, "optimal_to_best":
// ratio}, …], "notes": [the least such ratio]}; a policy for which memory does not suffice has null.
nlohmann::ordered_json policy_grid();
// Of those rows one in `every`, the first included.
nlohmann::ordered_json policy_grid_thinned(std::size_t every);

}  // namespace poise
