"""Notices that a run makes no progress. The work loops count progress in shared memory; sockets would answer even for a
hung process."""

import collections
import time

from . import processes

# A disk may write for long (a large output that is copied to another file system). A process that computes for long says from within that
# it moves (common/liveness/progress.h).
_DISK_FACTOR = 20
_DISK_SHARE = 0.05  # of our looks
# Who uses more than this much of a core while nothing moves, and most of what all use, is the one that hangs.
_BUSY, _MOST = 0.05, 0.8
_OWN_SLEEP = 5.0  # seconds; a longer gap between two calls means that we were asleep ourselves (a laptop's lid, a debugger)


class Stillness(collections.namedtuple("Stillness", "hung sentence")):
    """Why a run does not go on. `hung`: the processes it waits for, as far as can be known."""

    __slots__ = ()


class Watchdog:
    def __init__(self, patience):
        self._patience = patience
        self._looked = time.monotonic()
        self._slowest = 0.0
        self.begin_again()

    def begin_again(self):
        """What did not move is replaced. How long the next one takes to begin says nothing of how slow a step is, and neither does how
        long the ones behind it wait for that."""
        self._seen = None
        self._begun = set()  # places of the words that have moved
        self._moved(time.monotonic(), [])

    def _moved(self, now, children):
        self._since = now
        self._cpu_then = {child.pid: processes.cpu_seconds(child.pid) for child in children}
        self._disk_looks = self._looks = 0

    def look(self, words, children):
        """None while there is progress; a Stillness once there has been none for too long. `words`: a number for each thing that may
        move, which changes when that does."""
        now = time.monotonic()
        slept = now - self._looked > _OWN_SLEEP
        self._looked = now
        if words != self._seen or slept:
            moved = {at for at, (word, before) in enumerate(zip(words, self._seen or ())) if word != before}
            if not slept and moved & self._begun:
                self._slowest = max(self._slowest, now - self._since)
            self._begun |= moved
            self._seen = words
            self._moved(now, children)
            return None
        self._looks += 1
        self._disk_looks += any(processes.waits_for_a_disk(child.pid) for child in children)
        still = now - self._since
        patience = max(self._patience, 10 * self._slowest)
        if self._disk_looks > _DISK_SHARE * self._looks:
            patience *= _DISK_FACTOR
        return self._verdict(children, still) if still >= patience else None

    def _verdict(self, children, still):
        stopped = [child for child in children if processes.is_stopped(child.pid)]
        if stopped:
            names = " and ".join(child.plain_name for child in stopped)
            return Stillness(stopped, f"{names} stood still for {still:.0f} s (halted by a signal or a debugger)")
        used = {child: processes.cpu_seconds(child.pid) - self._cpu_then.get(child.pid, 0.0) for child in children}
        busy = [child for child in children if used[child] > max(_BUSY * still, _MOST * sum(used.values()))]
        if busy:
            return Stillness(busy, f"{busy[0].plain_name} computed for {still:.0f} s without getting anywhere (a defect of poise)")
        names = ", ".join(child.plain_name for child in children)
        return Stillness([], f"nothing moved for {still:.0f} s: {names} still live")
