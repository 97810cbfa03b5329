"""What dead runs left behind, found and removed."""

from ..shared.quantities import bytes_text, counted
from ..shared.trouble import say
from . import loaders, processes, segments


def clean_up():
    """What dead runs left: processes whose supervisor is gone, homes without a loader, shared memory. Says what."""
    orphans = [process for process in processes.running() if process.orphaned]
    if orphans:
        count = processes.end(orphans, patience=2)
        say(f"ended {count} process{'es' if count != 1 else ''} whose supervisor was gone")
    loaders.sweep()
    names, size = segments.reap()
    if names:
        say(f"removed {counted(len(names), 'shared memory segment')} of dead runs ({bytes_text(size)})")
    return bool(orphans or names)
