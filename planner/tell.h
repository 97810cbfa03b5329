#pragma once

#include <string>

namespace poise {

// One line for the user, at once: the supervisor relays what the planner prints. Logged, too.
void tell(const std::string& line);

}  // namespace poise
