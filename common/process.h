#pragma once
// What each of the three programs does the same way: leave in order on SIGTERM or SIGINT, leave
// when the supervisor is gone, log to its own file, say once why it ends. Called from main only,
// before any thread is started.

#include <functional>
#include <string>

#include "common/trouble.h"

namespace poise {

// From now on SIGTERM and SIGINT set a flag, SIGUSR1 another; SIGPIPE, SIGHUP and SIGXFSZ are ignored.
// `death_descriptor` (or -1) is the read end of a pipe whose write end only the supervisor holds:
// its end of file sets the flag too (a thread waits for it, and ends the process by force if it is
// still there 10 s later). Prompts stay out of core files.
void watch_signals(int death_descriptor);
bool stop_requested();
// SIGUSR1 asks a planner to leave its work to another one (launch/README.md); nobody else looks.
bool hand_over_requested();
// True where the supervisor is gone: then nobody else will clean up the shared memory.
bool orphaned();

// Log lines of this process go to `path` (0600, appended); with an empty path nothing is logged.
// Level "info" and above.
void open_log(const std::string& process, const std::string& path);

// Runs `body` and turns what it throws into one line on stderr, one line in the log, and the exit
// code.
int run_main(const std::string& process, const std::function<Exit()>& body);

}  // namespace poise
