#pragma once

#include <string>

namespace poise {

// Prints one line for the user at once (the supervisor relays what the planner prints) and logs it.
void announce(const std::string& line);

}  // namespace poise
