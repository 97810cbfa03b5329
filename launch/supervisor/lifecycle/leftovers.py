"""Finds and removes what dead runs left behind."""

from ..shared.quantities import bytes_text, counted
from ..shared.trouble import say
from . import loaders, processes, scratch, segments, short_folders


def sweep():
    """Removes what dead runs left in memory and in folders: (names of segments, their bytes)."""
    loaders.sweep()
    short_folders.sweep()
    scratch.sweep()
    return segments.reap()


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
