#pragma once
// What the three programs have in common: each ends in order on SIGTERM or SIGINT, ends when the
// supervisor is gone, logs to its own file, and says once why it ends. Call from main only, before
// any thread starts.

#include <functional>
#include <string>

#include "common/trouble.h"

namespace poise {

// Whose SIGTERM or SIGINT ends a process that has a supervisor. A service manager may signal all
// processes of a run at once (systemd does); the planner then finishes the iteration under way, for which
// it needs loader and executor. So these wait for the supervisor's signal, or 30 s without one.
enum class EndsFor { anyone, supervisor };

// From now on SIGTERM and SIGINT set one flag, SIGUSR1 another; SIGPIPE, SIGHUP and SIGXFSZ are
// ignored. `death_descriptor` (or -1) is the read end of a pipe whose write end only the supervisor
// holds: its end of file sets the first flag too. A thread waits for it, and kills the process if it
// still runs 10 s later. Core files are switched off, so that prompts do not get into them.
void watch_signals(int death_descriptor, EndsFor whom = EndsFor::anyone);
// For a process that only prints: from now on SIGTERM and SIGINT end it at once, with one line on stderr and Exit::interrupted. Lets
// through signals that came before, where the process that became this one (exec) blocked them.
void end_at_signals();
bool stop_requested();
// SIGUSR1 asks a planner or a loader to leave its work to a successor (launch/README.md).
bool hand_over_requested();
// True if the supervisor is gone: this process must then clean up the shared memory.
bool orphaned();

// Appends this process's log lines to `path` (0600), level "info" and above; an empty path logs
// nothing.
void open_log(const std::string& process, const std::string& path);

// Runs `body`, and turns an exception into one line on stderr, one line in the log and the exit
// code.
int run_main(const std::string& process, const std::function<Exit()>& body);

}  // namespace poise
