#pragma once
// `poise plan`: what a run of the same arguments would do, and how fast, with no GPU and no weights.
// Sizes, policy and schedule are the run's own decisions. A part of the requests, spread evenly over
// the file, is scheduled iteration by iteration; of iterations that are alike in rows and context one
// is played in virtual time and stands for the others; what they take is extended to all requests by
// the rate at which answers end once the machine is full. Pure but for reading the files.

#include <nlohmann/json_fwd.hpp>

#include "planner/forecast/plan_setup.h"

namespace poise {

// Fails, with numbers, where the run would be refused for its size. Bytes, seconds, tokens.
nlohmann::ordered_json plan_run(const PlanOptions& options);

}  // namespace poise
