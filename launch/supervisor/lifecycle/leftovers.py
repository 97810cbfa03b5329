"""Finds and removes what dead runs left behind."""

from ..shared.quantities import bytes_text, counted
from ..shared.trouble import say
from . import loaders, processes, segments


def clean_up():
    """Ends processes whose supervisor is gone; removes homes without a loader and shared memory of dead runs. Prints what it
    did; true if there was anything."""
    orphans = [process for process in processes.running() if process.orphaned]
    if orphans:
        count = processes.end(orphans, patience=2)
        say(f"ended {count} process{'es' if count != 1 else ''} whose supervisor was gone")
    loaders.sweep()
    names, size = segments.reap()
    if names:
        say(f"removed {counted(len(names), 'shared memory segment')} of dead runs ({bytes_text(size)})")
    return bool(orphans or names)
