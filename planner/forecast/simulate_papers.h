#pragma once
// The papers' experiments by name, run by planner/forecast/simulate.h on a named machine.

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/files/json.h"
#include "common/model_shape.h"
#include "planner/costs/cost_model.h"
#include "planner/forecast/simulate.h"

namespace poise {

// OPT's published sizes ("opt-6.7b" …); fails with the names there are.
ModelShape opt_shape(std::string_view name);
// Keys and values for fewer heads than there are queries, as in Llama-3 (8 of 32) and Mistral; the rest as it is.
ModelShape with_shared_keys(ModelShape shape, std::int32_t key_value_heads);

// The machine that the user named instead of the paper's: a name or a file (costs/machine_file.h).
using SimulatedOn = std::optional<std::string>;

struct Simulation {
  std::string_view name;
  std::string_view description;
  // {"rows": [{"model": "opt-6.7b", "act-only": tokens/s, …}, …], "notes": ["…"]}; all rows have the
  // same names. Figures with more than rows have further fields of their own.
  nlohmann::ordered_json (*run)(const SimulatedOn& on);
};
std::span<const Simulation> simulations();
// Fails with the names there are.
const Simulation& simulation_named(std::string_view name);

// FlexGen's measured share of the link's roof. On an H200 with 24 GiB, OPT-6.7B 128 × 1024, 13B
// 128 × 512 and 30B 64 × 512 tokens ran at 59 to 76 % of it (planner/README.md); this is the middle.
inline constexpr double kFlexGenOfRoof = 0.67;
// The policy that "ours" means.
std::string_view our_policy();

// The experiments, each as Simulation::run.
nlohmann::ordered_json capture_table3(const SimulatedOn& on);
nlohmann::ordered_json capture_figure1(const SimulatedOn& on);
nlohmann::ordered_json capture_figure8(const SimulatedOn& on);
nlohmann::ordered_json capture_figure9(const SimulatedOn& on);
nlohmann::ordered_json capture_figure10(const SimulatedOn& on);
nlohmann::ordered_json kvpr_gains(const SimulatedOn& on);
nlohmann::ordered_json kvpr_figure8(const SimulatedOn& on);
nlohmann::ordered_json ours_beyond(const SimulatedOn& on);
nlohmann::ordered_json host_cores(const SimulatedOn& on);
nlohmann::ordered_json whole_runs(const SimulatedOn& on);

// A system of CAPTURE's evaluation on its machine.
enum class PaperSystem { deepspeed, flexgen, act_only, hybrid_static, hybrid, ours };
std::string_view name_of(PaperSystem system);
SimulatedRun simulate_system(PaperSystem system, const std::string& machine, SimulatedWork work);

}  // namespace poise
