#pragma once
// `poise plan`: what a run with the same arguments would do, and how fast, without GPU and weights.
// Sizes, policy and schedule are the run's own decisions. Some of the requests, spread evenly over the
// file, are scheduled iteration by iteration. Of similar iterations (in rows and context) one is played
// in virtual time and stands for the others. The result is extended to all requests by the rate at
// which answers end once the machine is full. Pure, except that it reads the files.

#include <nlohmann/json_fwd.hpp>

#include "planner/forecast/plan_setup.h"

namespace poise {

// Fails with numbers if the run would be refused for its size. Units: bytes, seconds, tokens.
nlohmann::ordered_json plan_run(const PlanOptions& options);

}  // namespace poise
