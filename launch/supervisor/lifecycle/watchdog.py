"""Notices that a run no longer moves. Progress is what the work loops count in shared memory, not what sockets say."""

import time

from . import processes

# A process that computes may take long over one step (a large layer on the CPU device); one that only waits may not.
_BUSY_FACTOR = 20
_BUSY_SHARE = 0.05  # of a core
_OWN_SLEEP = 5.0  # a longer gap between two looks means that we slept, too


class Watchdog:
    def __init__(self, patience):
        self._patience = patience
        self._seen = None
        self._looked = time.monotonic()
        self._slowest = 0.0
        self._moved(self._looked, 0.0)

    def _moved(self, now, cpu):
        self._since = now
        self._cpu_then = cpu

    def look(self, words, children):
        """A sentence once nothing has moved for too long; None until then."""
        now = time.monotonic()
        cpu = sum(processes.cpu_seconds(child.pid) for child in children)
        slept = now - self._looked > _OWN_SLEEP
        self._looked = now
        if words != self._seen or slept:
            if not slept and self._seen is not None:
                self._slowest = max(self._slowest, now - self._since)
            self._seen = words
            self._moved(now, cpu)
            return None
        still = now - self._since
        patience = max(self._patience, 10 * self._slowest)
        if (cpu - self._cpu_then) > _BUSY_SHARE * still:
            patience *= _BUSY_FACTOR
        if still < patience:
            return None
        stopped = [child.plain_name for child in children if processes.is_stopped(child.pid)]
        if stopped:
            return f"{' and '.join(stopped)} stood still for {still:.0f} s (halted by a signal or a debugger)"
        return f"nothing moved for {still:.0f} s: {', '.join(child.plain_name for child in children)} still live"
