"""Shared memory as the supervisor sees it: names in /dev/shm, and the words of the control segment.

common/shared_layout.h defines the layout and static_asserts the offsets used here; tests/e2e/house_rules.py compares them.
"""

import contextlib
import fcntl
import os
import struct
from pathlib import Path

from ..shared.paths import command_line, is_bundle
from ..shared.trouble import Refusal
from . import processes

FOLDER = Path("/dev/shm")

_MAGIC = 0x4553494F50
_ABI_VERSION = 7
_LOADER_STATE = 2048
_LOADER_EPOCH = 2052
_LOADED_BYTES = 2056
_FINGERPRINT_READY = 2064
_PROGRESS = 2176
_PROGRESS_STRIDE = 64
_SIZE = 4096

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
    """Whether no process is attached to a segment. If so, it stays locked until `locks` is closed: no process can attach."""
    try:
        descriptor = os.open(FOLDER / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False  # just removed, or another user's
    locks.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    # No link left: another process removed it, and the name may belong to a new segment by now.
    return os.fstat(descriptor).st_nlink > 0


@contextlib.contextmanager
def held(run_id):
    """Within it no one reaps the segments of `run_id`, though no process of that id lives: one has gone, and its successor has
    not begun yet."""
    with contextlib.ExitStack() as locks:
        for name in names_of(run_id):
            try:
                descriptor = os.open(FOLDER / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except OSError:
                continue
            locks.callback(os.close, descriptor)
            with contextlib.suppress(OSError):  # who reaps holds it: the segment is about to go
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield


def reap():
    """Unlinks the segments of dead runs; returns (names, bytes).

    A run is dead if none of its segments is held and no living process was started with its id. We list segments first
    and processes second: a process whose segment we see had started before we list processes. We unlink segments while
    we hold their locks; a process that waits for such a lock then finds the segment without a name and makes another.
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
    """Reads the words of a control segment, once magic, version and size are as expected; before that all words read as 0."""

    def __init__(self, run_id):
        self._path = FOLDER / f"{prefix()}{run_id}-control"
        self._descriptor = -1

    def ready(self):
        """Whether the segment exists and has our layout."""
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

    def check_layout(self):
        """Refuses if the loader writes another layout than ours: it was built from other sources."""
        self.ready()
        head = os.pread(self._descriptor, 16, 0) if self._descriptor >= 0 else b""
        magic, version, size = struct.unpack("<QII", head.ljust(16, b"\0"))
        if not magic:
            return  # the loader has not made it yet; it writes the magic last
        if (magic, version, size) != (_MAGIC, _ABI_VERSION, _SIZE):
            remedy = "make the bundle again" if is_bundle() else f"run `{command_line('setup')}`"
            raise Refusal(
                f"the programs were built from other sources than this command (shared memory of version {version}, "
                f"expected {_ABI_VERSION}): {remedy}"
            )

    def _word(self, offset, kind="<Q"):
        raw = os.pread(self._descriptor, struct.calcsize(kind), offset)
        return struct.unpack(kind, raw)[0] if len(raw) == struct.calcsize(kind) else 0

    @property
    def loader_state(self):
        return self._word(_LOADER_STATE, "<I") if self.ready() else CREATING

    @property
    def loader_epoch(self):
        """How many loaders have held these segments, one after the other."""
        return self._word(_LOADER_EPOCH, "<I") if self.ready() else 0

    @property
    def loaded_bytes(self):
        return self._word(_LOADED_BYTES) if self.ready() else 0

    @property
    def was_sealed(self):
        """All weights were loaded once, and their fingerprint is known."""
        return self.loader_state in (LOADING, SEALED) and self._word(_FINGERPRINT_READY) == 1

    @property
    def were_loaded(self):
        """All weights were loaded once, even if the loader has begun to remove them."""
        return self.ready() and self._word(_FINGERPRINT_READY) == 1

    @property
    def which(self):
        """Tells apart loaders that have held segments of this run id, one after the other; a greater epoch or another segment is
        another loader."""
        return (os.fstat(self._descriptor).st_ino, self.loader_epoch) if self.ready() else (0, 0)

    @property
    def progress(self):
        """The progress counters of loader, planner and gpu_executor."""
        if not self.ready():
            return (0, 0, 0)
        return tuple(self._word(_PROGRESS + index * _PROGRESS_STRIDE) for index in range(3))

    def close(self):
        """May be used again: the next segment of that name is then opened."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def reserved(run_id, what):
    """(bytes reserved so far, bytes wanted) of the newest segment of this kind; (0, 0) if there is none."""
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
