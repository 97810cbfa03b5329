"""The supervisor's failpoints: places where a test makes this process die, halt, or see a write fail. For tests alone.

common/testing/failpoint.h explains POISE_FAILPOINTS and POISE_FAILPOINTS_FIRED, and has the other programs' points.
"""

import errno
import os
import re
import signal

from .trouble import Refusal, shown

# What each is, with its kill point or fault.
POINTS = {
    "supervisor.half_started": "S1 F7: a loader lives, of planner and gpu_executor one",
    "supervisor.steady": "S2 F7: one look after the other, while all three live",
    "supervisor.all_ended": "I9: no process lives, their shared memory is there",
    "supervisor.write": "F55: a small file of the run directory",
}
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "abort": signal.SIGABRT}
_ENTRY = re.compile(r"(?:(\w+)/)?(supervisor\.\w+):([^@+]*)(?:@([1-9]\d*))?(\+?)")


def _armed():
    """[point, action, nth, whether later times count, index of the entry, times reached]"""
    entries = []
    for index, word in enumerate(filter(None, os.environ.get("POISE_FAILPOINTS", "").split(","))):
        if "supervisor" not in word:
            continue  # the programs judge it
        entry = _ENTRY.fullmatch(word)
        if not entry or entry[1] not in (None, "supervisor") or not _knows(entry[2], entry[3]):
            raise Refusal(f"POISE_FAILPOINTS: {shown(word)} is no entry for the supervisor (launch/supervisor/shared/failpoints.py)")
        entries.append([entry[2], entry[3], int(entry[4] or 1), bool(entry[5]), index, 0])
    return entries


def _knows(point, action):
    if point not in POINTS:
        return False
    name = action.removeprefix("errno=")
    return action in _SIGNALS or (point == "supervisor.write" and name != action and hasattr(errno, name))


_entries = None


def failpoint(point):
    """What the environment wants to happen here. Raises OSError where a call is to fail."""
    global _entries
    if _entries is None:
        _entries = _armed()
    for entry in _entries:
        name, action, nth, later, index, _ = entry
        if name != point:
            continue
        entry[5] += 1
        if (entry[5] == nth or (later and entry[5] > nth)) and _fires(index, point, later):
            if action in _SIGNALS:
                os.kill(os.getpid(), _SIGNALS[action])
            else:
                number = getattr(errno, action.removeprefix("errno="))
                raise OSError(number, os.strerror(number))


def _fires(index, point, later):
    folder = os.environ.get("POISE_FAILPOINTS_FIRED")
    if not folder:
        return True
    try:
        with open(os.path.join(folder, str(index)), "x", encoding="ascii") as file:
            file.write(f"supervisor {point}\n")
    except FileExistsError:
        return later
    return True
