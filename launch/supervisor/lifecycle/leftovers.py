"""Finds and removes what dead runs left behind, and waits for what they are giving back."""

import time

from ..shared.paths import PLAIN_NAMES
from ..shared.quantities import bytes_text, counted
from ..shared.trouble import say
from . import loaders, processes, scratch, segments, short_folders

_MEMORY_COMES = 30.0  # seconds: a hundred GiB take the kernel ten
_TELL = 1.0
_LOOK = 0.05


def sweep():
    """Removes what dead runs left in memory and in folders: (names of segments, their bytes)."""
    loaders.sweep()
    short_folders.sweep()
    scratch.sweep()
    return segments.reap()


def await_memory(interrupted=lambda: False):
    """Waits until processes of ended runs have given their memory back: that of the host and of a GPU. A process that its supervisor
    does not wait for ends within 10 s, but for what the kernel needs to take its memory apart."""
    until = time.monotonic() + _MEMORY_COMES
    told = False
    while (ending := processes.ending()) and time.monotonic() < until and not interrupted():
        if not told and time.monotonic() > until - _MEMORY_COMES + _TELL:
            say(f"waiting for {still_ending(ending)}")
            told = True
        time.sleep(_LOOK)


def still_ending(ending=None):
    """Processes of ended runs that still hold memory, as a clause; "" if there are none."""
    ending = processes.ending() if ending is None else ending
    names = ", ".join(f"{PLAIN_NAMES[program]} {pid}" for pid, program in ending)
    return f"the memory of {'a run that has' if len(ending) == 1 else 'runs that have'} just ended (process {names})" if ending else ""


def clean_up():
    """Ends processes whose supervisor is gone; removes homes without a loader and shared memory of dead runs. Prints what it
    did; true if there was anything."""
    orphans = [process for process in processes.running() if process.orphaned]
    if orphans:
        count = processes.end(orphans, patience=2)
        say(f"ended {count} process{'es' if count != 1 else ''} whose supervisor was gone")
    names, size = sweep()
    if names:
        say(f"removed {counted(len(names), 'shared memory segment')} of dead runs ({bytes_text(size)})")
    return bool(orphans or names)
