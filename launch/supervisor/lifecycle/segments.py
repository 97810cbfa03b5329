"""Shared memory as the supervisor sees it: names in /dev/shm, and the control segment's words.

The layout is common/shared_layout.h's; its static_asserts hold the offsets used here.
"""

import contextlib
import fcntl
import os
import struct
from pathlib import Path

from . import processes

FOLDER = Path("/dev/shm")

_MAGIC = 0x4553494F50
_ABI_VERSION = 2
_LOADER_STATE = 256
_LOADED_BYTES = 264
_FINGERPRINT_READY = 272
_PROGRESS = 384
_PROGRESS_STRIDE = 64
_SIZE = 768

CREATING, LOADING, SEALED, DRAINING = range(4)


def prefix():
    return f"poise-{os.geteuid()}-"


def names_of(run_id):
    """Segments of one run that exist."""
    try:
        return sorted(n for n in os.listdir(FOLDER) if n.startswith(f"{prefix()}{run_id}-"))
    except OSError:
        return []


def unlink_all(run_id):
    for name in names_of(run_id):
        try:
            os.unlink(FOLDER / name)
        except OSError:
            pass


def run_ids():
    """Every run of this user that has segments."""
    try:
        names = os.listdir(FOLDER)
    except OSError:
        return []
    mine = (n[len(prefix()) :] for n in names if n.startswith(prefix()))
    return sorted({rest.partition("-")[0] for rest in mine})


def _is_ours_alone(name, locks):
    """Whether nobody is attached to a segment. It is then locked until `locks` is closed, so that nobody can be."""
    try:
        descriptor = os.open(FOLDER / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False  # gone just now, or not ours to judge
    locks.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    # Without a name: somebody else removed it, and what bears the name by now is another.
    return os.fstat(descriptor).st_nlink > 0


def reap():
    """Unlinks the segments of runs that nobody lives in any more; returns (names, bytes).

    Dead is a run none of whose segments is held, and whose id no living process was started with. Segments are looked
    at first, processes second: whoever has made a segment that we see had started before we look for processes. Names
    go while their segments are locked; who was about to lock one, too, finds it without a name and makes another.
    """
    groups = {run_id: names_of(run_id) for run_id in run_ids()}
    living = {process.run_id for process in processes.running()} if groups else set()
    names, size = [], 0
    for run_id, group in groups.items():
        with contextlib.ExitStack() as locks:
            if run_id in living or not all(_is_ours_alone(name, locks) for name in group):
                continue
            for name in group:
                try:
                    size += os.stat(FOLDER / name).st_blocks * 512
                    os.unlink(FOLDER / name)
                    names.append(name)
                except OSError:
                    pass
    return names, size


class ControlView:
    """Reads the words of a control segment; None of it is believed before magic and version agree."""

    def __init__(self, run_id):
        self._path = FOLDER / f"{prefix()}{run_id}-control"
        self._descriptor = -1

    def ready(self):
        """Whether the segment exists and is of our layout."""
        if self._descriptor < 0:
            try:
                self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except OSError:
                return False
        head = os.pread(self._descriptor, 16, 0)
        if len(head) < 16:
            return False
        magic, version, size = struct.unpack("<QII", head)
        return (magic, version, size) == (_MAGIC, _ABI_VERSION, _SIZE)

    def _word(self, offset, kind="<Q"):
        raw = os.pread(self._descriptor, struct.calcsize(kind), offset)
        return struct.unpack(kind, raw)[0] if len(raw) == struct.calcsize(kind) else 0

    @property
    def loader_state(self):
        return self._word(_LOADER_STATE, "<I") if self.ready() else CREATING

    @property
    def loaded_bytes(self):
        return self._word(_LOADED_BYTES) if self.ready() else 0

    @property
    def was_sealed(self):
        """The weights were all there once, and their fingerprint is known."""
        return self.loader_state in (LOADING, SEALED) and self._word(_FINGERPRINT_READY) == 1

    @property
    def progress(self):
        """The words of loader, planner and gpu_executor."""
        if not self.ready():
            return (0, 0, 0)
        return tuple(self._word(_PROGRESS + index * _PROGRESS_STRIDE) for index in range(3))

    def close(self):
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def reserved(run_id, what):
    """(bytes reserved so far, bytes wanted) of one segment; the newest, where there are several. (0, 0): none."""
    newest = (-1, 0, 0)
    for name in names_of(run_id):
        kind, _, epoch = name[len(f"{prefix()}{run_id}-") :].partition("-")
        if kind == what:
            try:
                status = os.stat(FOLDER / name)
                newest = max(newest, (int(epoch or 0), min(status.st_blocks * 512, status.st_size), status.st_size))
            except (OSError, ValueError):
                pass
    return newest[1:]


def weights_bytes(run_id):
    try:
        return os.stat(FOLDER / f"{prefix()}{run_id}-weights").st_size
    except OSError:
        return 0
