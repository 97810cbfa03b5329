#pragma once
// The papers' experiments by name, played by planner/simulate.h on a named machine.

#include <nlohmann/json.hpp>
#include <span>
#include <string_view>
#include <vector>

#include "common/model_shape.h"

namespace poise {

// OPT's published sizes ("opt-6.7b" …); fails with the names there are.
ModelShape opt_shape(std::string_view name);

struct Simulation {
  std::string_view name;
  std::string_view description;
  // {"rows": [{"model": "opt-6.7b", "act-only": tokens/s, …}, …]}
  nlohmann::ordered_json (*play)();
};
std::span<const Simulation> simulations();
// Fails with the names there are.
const Simulation& simulation_named(std::string_view name);

}  // namespace poise
