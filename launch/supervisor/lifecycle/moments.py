"""When each part of a run began, in seconds since the command did: RUN/times.json.

The supervisor notes its own moments, the planner those of its work (status.json). Both read CLOCK_MONOTONIC.
"""

import contextlib
import json
import os
import time

from ..shared.trouble import Refusal
from . import processes

FILE = "times.json"

# In the order in which they come, and what the time that ends there is called.
_PARTS = {
    "loader": "command", "model": "model in memory", "processes": "", "decided": "GPU and plan", "pool": "pool",
    "ready": "buffers", "first_order": "first order", "last_answer": "work", "published": "output", "planner_ended": "planner",
    "ended": "processes",
}  # fmt: skip


def _command_began():
    """When the kernel started this process, on CLOCK_MONOTONIC."""
    ticks = processes.start_time(os.getpid())
    since_boot = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK") if ticks else 0.0
    return time.monotonic() - max(since_boot, 0.0)


class Moments:
    def __init__(self):
        self._began = _command_began()
        self._seen = {}

    def note(self, moment):
        """The first time it is reached."""
        self._seen.setdefault(moment, time.monotonic() - self._began)

    def keep(self, directory, run_id):
        """Writes them, with those of this attempt's planner, in the order of time."""
        planners = directory.status_of(run_id).get("moments")
        own = {name: when - self._began for name, when in planners.items()} if isinstance(planners, dict) else {}
        every = sorted({**own, **self._seen}.items(), key=lambda entry: entry[1])
        with contextlib.suppress(Refusal):
            directory.write(FILE, json.dumps({"run_id": run_id, **{name: round(when, 3) for name, when in every}}) + "\n")


def words(directory):
    """Where a run's time went, in one line; "" if that is not known."""
    times = {name: when for name, when in directory.fact(FILE).items() if isinstance(when, (int, float))}
    if not {"first_order", "last_answer", "ended"} <= times.keys():
        return ""
    first, last, ended = times["first_order"], times["last_answer"], times["ended"]
    parts, before = [], 0.0
    for name, called in _PARTS.items():
        if called and name in times and times[name] <= first:
            parts.append(f"{called} {times[name] - before:.1f}")
            before = times[name]
    return f"{ended:.1f} s: {first:.1f} to the first order ({', '.join(parts)}), {last - first:.1f} of work, {ended - last:.1f} to end"
