#pragma once

#include <string>

namespace poise {

// One line for the user, at once: the supervisor relays what the planner prints. Logged, too.
void announce(const std::string& line);

}  // namespace poise
