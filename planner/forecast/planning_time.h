#pragma once
// `poise bench --stage planner`: how long this thread takes to plan the iterations of a run, part by part,
// without an executor. Set up as a run would be; the schedule, packing, tables, layer orders and messages are
// the run's own. Not timed is the play in virtual time, by which a run with a profile predicts an iteration
// and spreads its weights. Of each iteration the time that it is predicted to take is known, too
// (virtual_executor.h).

#include <nlohmann/json_fwd.hpp>

#include "planner/forecast/plan_setup.h"

namespace poise {

// Of at most `options.timed` iterations. Fails as plan_run does. Units: seconds of the thread's core, bytes.
nlohmann::ordered_json time_planning(const PlanOptions& options);

}  // namespace poise
