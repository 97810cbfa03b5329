"""Notices that a run makes no progress. The work loops count progress in shared memory; sockets would answer even for a
hung process."""

import time

from . import processes

# A step may take long while a process computes (a large layer on the CPU device) or a disk writes (a large output that is copied to
# another file system), but not while all only wait for each other.
_BUSY_FACTOR = 20
_BUSY_SHARE = 0.05  # of a core, or of our looks
_OWN_SLEEP = 5.0  # seconds; a longer gap between two calls means that we were asleep ourselves (a laptop's lid, a debugger)


class Watchdog:
    def __init__(self, patience):
        self._patience = patience
        self._seen = None
        self._looked = time.monotonic()
        self._slowest = 0.0
        self._disk_looks = self._looks = 0
        self._moved(self._looked, 0.0)

    def _moved(self, now, cpu):
        self._since = now
        self._cpu_then = cpu
        self._disk_looks = self._looks = 0

    def look(self, words, children):
        """None while there is progress; a sentence once there has been none for too long."""
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
        self._looks += 1
        self._disk_looks += any(processes.waits_for_a_disk(child.pid) for child in children)
        still = now - self._since
        patience = max(self._patience, 10 * self._slowest)
        if (cpu - self._cpu_then) > _BUSY_SHARE * still or self._disk_looks > _BUSY_SHARE * self._looks:
            patience *= _BUSY_FACTOR
        if still < patience:
            return None
        stopped = [child.plain_name for child in children if processes.is_stopped(child.pid)]
        if stopped:
            return f"{' and '.join(stopped)} stood still for {still:.0f} s (halted by a signal or a debugger)"
        return f"nothing moved for {still:.0f} s: {', '.join(child.plain_name for child in children)} still live"
